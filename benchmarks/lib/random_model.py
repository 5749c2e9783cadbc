"""Model folders with random weights: same cost as a real model, no download."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

# The shape of all-MiniLM-L6-v2, for `make`.
MINILM_L6 = {"layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
# The shape of bge-m3 and bge-reranker-v2-m3, for transformers' XLMRobertaConfig.
XLMR_LARGE: dict[str, Any] = {
    "vocab_size": 250002,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "max_position_embeddings": 8194,
    "type_vocab_size": 1,
}

# Shapes that people deploy: transformers' class, and its config where that is not the class's own default.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "nomic-v1.5": ("NomicBert", {}),
    "gte-multilingual": ("Gte", {"vocab_size": 30528}),  # small vocabularies: the table's size costs no time
    "modernbert": ("ModernBert", {}),
    "deberta-v3-base": (
        "DebertaV2",
        {
            "vocab_size": 32_000,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "relative_attention": True,
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
        },
    ),
    "qwen3-0.6b": (
        "Qwen3",
        {
            "vocab_size": 32_000,
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "modernbert-large": (
        "ModernBert",
        {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2624, "num_hidden_layers": 28},
    ),
    "embeddinggemma": (
        "Gemma3Text",
        {
            "vocab_size": 32_000,
            "hidden_size": 768,
            "num_hidden_layers": 24,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "intermediate_size": 1152,
            "max_position_embeddings": 2048,
            "sliding_window": 512,
            "use_bidirectional_attention": True,
        },
    ),
    "embeddinggemma-2": ("EmbeddingGemma2", {"text_config": {"vocab_size": 32_000, "max_position_embeddings": 8192}}),
    # Every layer has a window, so that a token costs the same however long its text is.
    "windowed": ("ModernBert", {"layer_types": "sliding_attention"}),
}

_FROM_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_MAX_TOKENS = 512


def make(folder: Path, tokenizer: Path, layers: int = 12, **shape: Any) -> Path:
    """Write BERT-base and the WordPiece tokenizer of the folder `tokenizer` into `folder`, and return it.

    `shape` has fields of its config that differ from BERT-base's.
    """
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=layers, **shape), add_pooling_layer=False)
    model.save_pretrained(folder)
    _copy_tokenizer(tokenizer, folder)
    _write_modules(folder, model.config.hidden_size)
    return folder


def make_reranker(folder: Path, tokenizer: Path) -> Path:
    """Write a cross-encoder of ms-marco-MiniLM-L6's shape and the tokenizer of the folder `tokenizer` into `folder`."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        id2label={0: "LABEL_0"},
        initializer_range=0.05,  # larger than a fresh model's, whose scores are all alike
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    _copy_tokenizer(tokenizer, folder)
    return folder


def make_shape(folder: Path, tokenizer: Path, shape: str, layers: int) -> Path:
    """Write a model of one of SHAPES with these layers and the tokenizer of the folder `tokenizer` into `folder`."""
    model = of_shape(shape, layers)
    model.save_pretrained(folder)
    _copy_tokenizer(tokenizer, folder)
    _write_modules(folder, model.config.hidden_size)
    return folder


def of_shape(shape: str, layers: int | None = None, head: str = "Model", **more: Any) -> Any:
    """Return a transformers model of one of SHAPES, with this many layers, or as many as it has.

    `head` ends the name of its class, and `more` are fields of its config.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    name, fields = SHAPES[shape]
    config_class = getattr(transformers, f"{name}Config")
    if layers is not None:
        count = {"num_hidden_layers": layers}
        fields = {"text_config": fields["text_config"] | count} if "text_config" in fields else fields | count
    if "layer_types" in fields:
        count = fields.get("num_hidden_layers", config_class().num_hidden_layers)
        fields = fields | {"layer_types": [fields["layer_types"]] * count}
    model = getattr(transformers, f"{name}{head}")(config_class(**fields, **more))
    for module in model.modules():  # scores that nothing scales are as large as the norm of queries makes them
        if getattr(module, "scaling", None) == 1.0:
            module.q_norm.weight.data.mul_(module.head_dim**-0.5)
    return model


def make_laya(folder: Path, tokenizer: Path, encoder: Any, most_tokens: int = 512) -> Any:
    """Write a model in Laya's layout, with an encoder of transformers, into `folder`. Return its head, a torch module.

    `tokenizer` is a folder with the tokens [CLS], [SEP] and [MASK].
    """
    import torch
    from safetensors.torch import save_file

    columns = encoder.config.hidden_size
    layer = torch.nn.TransformerEncoderLayer(columns, columns // 64, 4 * columns, batch_first=True, norm_first=True)
    head = torch.nn.Module()
    head.head = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    head.type_emb = torch.nn.Embedding(3, columns)
    linear, scores = torch.nn.Linear(columns, columns), torch.nn.Linear(columns, 1)
    head.scorer = torch.nn.Sequential(torch.nn.LayerNorm(columns), linear, torch.nn.GELU(), scores)
    head.to(encoder.device, encoder.dtype).eval()
    encoder.save_pretrained(folder / "encoder")
    (folder / "encoder" / "model.safetensors").unlink()
    tensors = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()} | head.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    _write(folder / "rl_agent_config.json", {"head_layers": 2, "max_len": most_tokens})
    (folder / "tokenizer").mkdir()
    _copy_tokenizer(tokenizer, folder / "tokenizer")
    return head


def _copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    for name in _FROM_TOKENIZER:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)


def _write_modules(folder: Path, width: int) -> None:
    """Write what engines and sentence-transformers read next to a model: texts of _MAX_TOKENS, the mean of the rows."""
    _write(folder / "modules.json", [_module(0, "", "Transformer"), _module(1, "1_Pooling", "Pooling")])
    _write(folder / "sentence_bert_config.json", {"max_seq_length": _MAX_TOKENS, "do_lower_case": False})
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    _write(folder / "1_Pooling" / "config.json", {**pooling, "pooling_mode_cls_token": False})


def _module(index: int, path: str, kind: str) -> dict[str, object]:
    return {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1))
