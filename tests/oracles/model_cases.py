"""Small models of every model type, with random weights, and their kinds of tokenizers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

BERT_LIKE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
ROBERTA_LIKE = {**BERT_LIKE, "type_vocab_size": 1, "max_position_embeddings": 130}
NARROW = {**BERT_LIKE, "max_position_embeddings": 128, "embedding_size": 24}
GROUPED = {"num_hidden_layers": 5, "num_hidden_groups": 2, "inner_group_num": 2}
MODERNBERT = {**BERT_LIKE, "max_position_embeddings": 128, "pad_token_id": 0, "local_attention": 16}
ROTARY = {**BERT_LIKE, "max_position_embeddings": 128}
STRETCHED = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}
DISTILBERT = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": 128}
DECODER = {**BERT_LIKE, "max_position_embeddings": 128, "num_key_value_heads": 2}
WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EUROBERT = {**DECODER, "pad_token_id": 0}
ULTRABERT = {**EUROBERT, "sliding_window": 16}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MINISTRAL_ROPE = {
    "type": "yarn", "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0,
    "original_max_position_embeddings": 128, "max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
GEMMA = {
    **DECODER,
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 16,
}
EMBEDDING_GEMMA2 = {
    **DECODER,
    "head_dim": 32,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 128,
    "embedding_dim": 64,
}
LFM2 = {**DECODER, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
DEBERTA = {
    **BERT_LIKE,
    "max_position_embeddings": 128,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 16,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
# A `model_type`, and what is special where it has several models → HuggingFace's class and its config.
MODEL_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**BERT_LIKE, "max_position_embeddings": 128}),
    "bert, tanh": ("Bert", {**BERT_LIKE, "max_position_embeddings": 128, "hidden_act": "gelu_new"}),
    "roberta": ("Roberta", ROBERTA_LIKE),
    "roberta, padded with 5": ("Roberta", {**ROBERTA_LIKE, "pad_token_id": 5, "max_position_embeddings": 134}),
    "xlm-roberta": ("XLMRoberta", ROBERTA_LIKE),
    "xlm-roberta, long": ("XLMRoberta", {**ROBERTA_LIKE, "max_position_embeddings": 8194}),
    "camembert": ("Camembert", ROBERTA_LIKE),
    "distilbert": ("DistilBert", DISTILBERT),
    "mpnet": ("MPNet", {**BERT_LIKE, "max_position_embeddings": 130}),
    "mpnet, long": ("MPNet", {**BERT_LIKE, "num_attention_heads": 8, "max_position_embeddings": 514}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", {**ROBERTA_LIKE, "max_position_embeddings": 128}),
    "distilbert, relu": ("DistilBert", {**DISTILBERT, "activation": "relu"}),
    "electra": ("Electra", NARROW),
    "electra, as wide": ("Electra", {**NARROW, "embedding_size": 64}),
    "albert": ("Albert", NARROW),
    "albert, groups": ("Albert", {**NARROW, **GROUPED}),
    "deberta-v2": ("DebertaV2", DEBERTA),
    "deberta-v2, narrow": ("DebertaV2", {**DEBERTA, "embedding_size": 24, "pos_att_type": "c2p|p2c"}),
    "deberta-v2, own projections": ("DebertaV2", {**DEBERTA, "share_att_key": False, "norm_rel_ebd": "none"}),
    "deberta-v2, c2p": (
        "DebertaV2",
        {**DEBERTA, "share_att_key": False, "pos_att_type": ["c2p"], "position_buckets": -1, "type_vocab_size": 2},
    ),
    "deberta-v2, p2c": (
        "DebertaV2",
        {**DEBERTA, "share_att_key": False, "pos_att_type": ["p2c"], "position_biased_input": True},
    ),
    "deberta-v2, plain": (
        "DebertaV2",
        {
            **DEBERTA,
            "relative_attention": False,
            "norm_rel_ebd": "none",
            "position_biased_input": True,
            "pooler_hidden_act": "tanh",
        },
    ),
    "modernbert": ("ModernBert", MODERNBERT),
    "modernbert, biases": (
        "ModernBert",
        {
            **MODERNBERT,
            "num_hidden_layers": 4,
            **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True),
            "classifier_pooling": "mean",
        },
    ),
    "nomic_bert": ("NomicBert", ROTARY),
    "nomic_bert, dynamic": ("NomicBert", {**ROTARY, "max_position_embeddings": 64, "rope_parameters": STRETCHED}),
    "gte": ("Gte", ROTARY),
    "gte, untyped": ("Gte", {**ROTARY, "type_vocab_size": 0, "hidden_act": "silu"}),
    "eurobert": ("EuroBert", EUROBERT),
    "eurobert, mean": ("EuroBert", {**EUROBERT, "classifier_pooling": "mean", "head_dim": 32}),
    "eurobert, biases": (
        "EuroBert",
        {
            **EUROBERT,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_pooling": "bos",
            "rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0},
        },
    ),
    "ultrabert": ("Ultrabert", ULTRABERT),
    "ultrabert, lists": (
        "Ultrabert",
        {
            **ULTRABERT,
            "attention_windows": [0, 5],
            "rope_theta": [300.0, 70.0],
            "classifier_pooling": "mean",
        },
    ),
    "llama": ("Llama", DECODER),
    "llama, biases": ("Llama", {**DECODER, "attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama, llama3": ("Llama", {**DECODER, "rope_parameters": LLAMA3}),
    "llama, yarn": ("Llama", {**DECODER, "rope_parameters": YARN}),
    "llama, linear": (
        "Llama",
        {**DECODER, "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "mistral": ("Mistral", {**DECODER, "sliding_window": 32}),
    "mistral, both ways": ("Mistral", {**DECODER, "sliding_window": 20, "is_causal": False}),
    "ministral3": ("Ministral3", {**DECODER, "head_dim": 32, "is_causal": False, "rope_parameters": MINISTRAL_ROPE}),
    "ministral3, windows": ("Ministral3", {**DECODER, "head_dim": 32, "sliding_window": 20}),
    "ministral3, scaled queries": (
        "Ministral3",
        {**DECODER, "head_dim": 32, "rope_parameters": {**MINISTRAL_ROPE, "original_max_position_embeddings": 32}},
    ),
    "qwen2": ("Qwen2", DECODER),
    "qwen2, both ways": ("Qwen2", {**DECODER, "is_causal": False}),
    "qwen2, windows": ("Qwen2", {**DECODER, **WINDOWS}),
    "qwen3": ("Qwen3", {**DECODER, "head_dim": 32}),
    "bidirectional_pplx_qwen3": ("Pplx", {**DECODER, "head_dim": 32}),
    "jina_embeddings_v5": ("JinaV5", {**DECODER, "head_dim": 32}),
    "gemma": ("Gemma", {**DECODER, "num_key_value_heads": 1, "head_dim": 32}),
    "gemma3_text": ("Gemma3Text", {**GEMMA, "use_bidirectional_attention": True}),
    "gemma3_text, causal": ("Gemma3Text", GEMMA),
    "gemma3_text, not causal": ("Gemma3Text", {**GEMMA, "is_causal": False}),
    "embedding_gemma2": ("EmbeddingGemma2", EMBEDDING_GEMMA2),
    "lfm2": ("Lfm2", LFM2),
    "lfm2, biases": ("Lfm2", {**LFM2, "conv_bias": True, "conv_L_cache": 4, "is_causal": False}),
}
SHORT_CASES = [name for name in MODEL_CASES if "long" not in name]  # of 128 positions
OWN_CODE = ("Pplx", "JinaV5")  # prefixes of classes that transformers does not have
DECODERS = (
    "eurobert", "ultrabert", "llama", "mistral", "ministral", "qwen", "bidirectional_pplx_qwen3", "jina_embeddings_v5",
    "gemma", "embedding_gemma2", "lfm2",
)  # fmt: skip
WITHOUT_HEADS = (*OWN_CODE, "Lfm2", "EmbeddingGemma2")
# Cases whose heads differ: by tensor names, pooling or activation. Positions and windows are of the encoder.
HEAD_CASES = [
    *(name for name in SHORT_CASES if "," not in name and MODEL_CASES[name][0] not in WITHOUT_HEADS),
    "electra, as wide", "deberta-v2, narrow", "deberta-v2, plain", "bert, tanh", "distilbert, relu",
    "modernbert, biases", "gte, untyped", "eurobert, mean", "eurobert, biases", "llama, biases",
]  # fmt: skip
MASKED_LM_CASES = [name for name in HEAD_CASES if not name.startswith(DECODERS)]

# The CUDA encoder does not run these; the last stands in tests/csrc/model_checkpoints.py, with adapters.
NAMES = (
    "nomic_bert, dynamic", "ministral3, scaled queries", "jina_embeddings_v3",
)  # fmt: skip
JINA_BERT, JINA, PEFT = "jina_bert_v2", "jina_embeddings_v3, its own files", "jina_embeddings_v3, PEFT's files"
ROUTED = "nomic_bert, experts"
CHECKPOINTS = (
    *(name for name in MODEL_CASES if name not in NAMES and "long" not in name),
    JINA_BERT,
    JINA,
    PEFT,
    ROUTED,
)


def _own_code(prefix: str, base: str, model_type: str, *, causal: bool) -> dict[str, Any]:
    """Classes of code that comes with checkpoints: transformers' of the prefix `base`."""
    config_base, model_base = (getattr(transformers, base + kind) for kind in ("Config", "Model"))
    body = {"model_type": model_type, "is_causal": causal, "__annotations__": {"is_causal": bool}}
    config: Any = type(f"{prefix}Config", (config_base,), {"__module__": __name__, **body})
    model: Any = type(f"{prefix}Model", (model_base,), {"__module__": __name__, "config_class": config})
    transformers.AutoConfig.register(model_type, config)
    transformers.AutoModel.register(config, model)
    return {each.__name__: each for each in (config, model)}


@functools.cache
def _own_classes() -> dict[str, Any]:
    return {
        **_own_code("Pplx", "Qwen3", "bidirectional_pplx_qwen3", causal=False),
        **_own_code("JinaV5", "Qwen3", "jina_embeddings_v5", causal=True),
    }


def hugging_face(name: str) -> Any:
    """A class of transformers, or of code that comes with checkpoints: made late, as its bases take 5 s to import."""
    if name == "EmbeddingGemma2Config":
        return _embedding_gemma2_config
    return _own_classes()[name] if name.startswith(OWN_CODE) else getattr(transformers, name)


def _embedding_gemma2_config(initializer_range: float = 0.02, **text: Any) -> Any:
    """The config of the whole model, with `text` of its text part."""
    made: Any = transformers.EmbeddingGemma2Config  # type: ignore[attr-defined]
    return made(text_config={**text, "initializer_range": initializer_range}, initializer_range=initializer_range)


def build(
    folder: Path,
    case: str,
    *,
    vocab_size: int = 64,
    head: str = "Model",
    modules: bool = True,
    tokenizer: Backend | None = None,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "1GB",
    **more: Any,
) -> Path:
    """A model folder with random weights, a `tokenizer` or none, and sentence-transformers' `modules` or none.

    `head` "ForMaskedLM" or "ForSequenceClassification" stores the encoder under a prefix. `more` is more of the config.
    """
    prefix, config = MODEL_CASES[case]
    torch.manual_seed(0)
    # Gemma3TextModel, but Gemma3ForCausalLM.
    model_class = prefix.removesuffix("Text") + head if head == "ForCausalLM" else prefix + head
    made: torch.nn.Module = hugging_face(model_class)(
        hugging_face(prefix + "Config")(vocab_size=vocab_size, **{"initializer_range": 0.3, **config, **more})
    )
    for name, parameter in made.named_parameters():
        # HuggingFace starts biases and the padding token's rows at 0 and LayerNorm at 1, so an encoder that forgets
        # them would pass.
        if "norm" in name.lower() or name.endswith(("bias", "_embeddings.weight", "embed_tokens.weight")):
            parameter.data += torch.randn_like(parameter) * 0.2
        if name.endswith("embedding_projection.weight"):  # follows the pooling here
            torch.nn.init.eye_(parameter)
    for name, buffer in made.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
    made.to(dtype)
    made.save_pretrained(folder, max_shard_size=shard_size)  # type: ignore[operator]
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    # Tests put tokenizers of any kind next to any model.
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "token_type_ids"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    if modules:
        write_modules(folder)
    return folder


def _trained_once(train: Callable[[int], Backend]) -> Callable[[int], Backend]:
    """A vocabulary of each size is trained once; every call returns a copy."""

    @functools.cache
    def trained(vocab_size: int) -> str:
        return train(vocab_size).to_str()

    return functools.wraps(train)(lambda vocab_size: Backend.from_str(trained(vocab_size)))


def small_tokenizer(vocab_size: int) -> Backend:
    """BERT's kind of tokenizer with a vocabulary of single characters."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    tokens += [*letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Backend(models.WordPiece({token: i for i, token in enumerate(tokens[:vocab_size])}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


@_trained_once
def byte_level(vocab_size: int) -> Backend:
    """RoBERTa's kind of tokenizer, trained on this file."""
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train([__file__], trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


@_trained_once
def unigram(vocab_size: int) -> Backend:
    """XLM-RoBERTa's kind of tokenizer, trained on this file."""
    tokenizer = Backend(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=vocab_size, special_tokens=special, unk_token="<unk>")
    tokenizer.train([__file__], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 2)])
    return tokenizer


def list_modules(folder: Path, *modules: tuple[str, str]) -> None:
    """Write modules.json: classes, and their folders."""
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (kind, path) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))


def write_modules(
    folder: Path,
    *,
    pooling: str | dict[str, Any] = "mean",
    dense: Sequence[tuple[int, int, str]] = (),
    normalize: bool = True,
) -> None:
    """Write sentence-transformers' files: modules.json, 1_Pooling, and random Dense modules (in, out, activation)."""
    kinds = ["Transformer", "Pooling", *(["Dense"] * len(dense)), *(["Normalize"] if normalize else [])]
    library = "sentence_transformers.models."
    list_modules(folder, *((library + kind, f"{i}_{kind}" if i else "") for i, kind in enumerate(kinds)))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    fields = {"pooling_mode": pooling, "embedding_dimension": 64} if isinstance(pooling, str) else pooling
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(fields))
    generator = torch.Generator().manual_seed(0)
    for i, (inputs, outputs, activation) in enumerate(dense, start=2):
        layer = folder / f"{i}_Dense"
        layer.mkdir()
        fields = {"in_features": inputs, "out_features": outputs, "bias": True, "activation_function": activation}
        (layer / "config.json").write_text(json.dumps(fields))
        save_file(
            {
                "linear.weight": torch.randn(outputs, inputs, generator=generator) * 0.1,
                "linear.bias": torch.randn(outputs, generator=generator) * 0.1,
            },
            layer / "model.safetensors",
        )
