"""Model folders for tests: the default model, copied by links and then changed; small ones with random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from embert import engine


def copy_model(folder: Path, *, without: tuple[str, ...] = ()) -> Path:
    """The default model's files, linked into `folder`, but for those named."""
    source = engine.load_model().folder
    for path in source.rglob("*"):
        target = folder / path.relative_to(source)
        if path.is_file() and path.name not in without:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path.resolve())
    return folder


def edit_json(path: Path, **values: Any) -> None:
    """Change a JSON file, which may be a link to one that must stay as it is, or not be there."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    path.write_text(json.dumps({**content, **values}))


def write_config(path: Path, *models: dict[str, Any]) -> str:
    """A file for --config."""
    tables = ("\n".join(f"{key} = {json.dumps(value)}" for key, value in model.items()) for model in models)
    path.write_text("".join(f"[[models]]\n{table}\n\n" for table in tables))
    return str(path)


# A BERT as small as can be, with the default model's tokenizer.
_SHAPE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 128, "type_vocab_size": 2, "vocab_size": 30522, "layer_norm_eps": 1e-12,
    "hidden_act": "gelu", "pad_token_id": 0,
}  # fmt: skip


NAN_WORD = "nan"  # a token whose embedding is not a number, so neither is any logit of a text with it


def build_classifier(folder: Path, *labels: str, seed: int = 0, tokens: bool = False) -> Path:
    """A BertForSequenceClassification with these labels; one: a cross-encoder. The seed alone makes its weights.

    With `tokens` it is a BertForTokenClassification.
    """
    source = engine.load_model().transformer_folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    names = {str(index): label for index, label in enumerate(labels)}
    config = {
        "model_type": "bert",
        "architectures": [f"BertFor{'Token' if tokens else 'Sequence'}Classification"],
        "id2label": names,
        "label2id": {label: int(index) for index, label in names.items()},
        **_SHAPE,
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    tensors = {
        name: (random.standard_normal(shape) * scale + offset).astype(np.float32)
        for name, shape, scale, offset in _tensors(len(labels))
        if not (tokens and "pooler" in name)
    }
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    tensors["bert.embeddings.word_embeddings.weight"][vocabulary[NAN_WORD]] = np.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _tensors(labels: int) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
    """Name, shape, standard deviation and mean of each tensor."""
    hidden, inner = _SHAPE["hidden_size"], _SHAPE["intermediate_size"]

    def linear(name: str, outputs: int, inputs: int) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
        yield f"{name}.weight", (outputs, inputs), 1.5 / inputs**0.5, 0.0
        yield f"{name}.bias", (outputs,), 0.2, 0.0

    def norm(name: str) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
        yield f"{name}.weight", (hidden,), 0.2, 1.0
        yield f"{name}.bias", (hidden,), 0.2, 0.0

    for kind, rows in (
        ("word", "vocab_size"),
        ("position", "max_position_embeddings"),
        ("token_type", "type_vocab_size"),
    ):
        yield f"bert.embeddings.{kind}_embeddings.weight", (_SHAPE[rows], hidden), 1.0, 0.0
    yield from norm("bert.embeddings.LayerNorm")
    for index in range(_SHAPE["num_hidden_layers"]):
        layer = f"bert.encoder.layer.{index}"
        for name in ("query", "key", "value"):
            yield from linear(f"{layer}.attention.self.{name}", hidden, hidden)
        yield from linear(f"{layer}.attention.output.dense", hidden, hidden)
        yield from norm(f"{layer}.attention.output.LayerNorm")
        yield from linear(f"{layer}.intermediate.dense", inner, hidden)
        yield from linear(f"{layer}.output.dense", hidden, inner)
        yield from norm(f"{layer}.output.LayerNorm")
    yield from linear("bert.pooler.dense", hidden, hidden)
    yield from linear("classifier", labels, hidden)


def write_layer(path: Path, outputs: int, inputs: int, name: str = "") -> None:
    """A linear layer with random weights. `name` precedes its tensors' names."""
    random = np.random.default_rng(outputs)
    weight = random.standard_normal((outputs, inputs)).astype(np.float32) / np.float32(inputs**0.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    bias = random.standard_normal(outputs).astype(np.float32) / 10
    save_file({f"{name}weight": weight, f"{name}bias": bias}, path)


def three_heads(folder: Path) -> Path:
    """The default model with bge-m3's further heads: dense, sparse and multi-vectors of one text."""
    copy_model(folder)
    write_layer(folder / "sparse_linear.safetensors", 1, 384)
    write_layer(folder / "colbert_linear.safetensors", 24, 384)
    return folder


def late_interaction(folder: Path) -> Path:
    """The default model as PyLate stores a ColBERT: markers, queries of 8 tokens, no vectors for commas."""
    copy_model(folder, without=("modules.json", "config_sentence_transformers.json"))
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    activation = "torch.nn.modules.linear.Identity"
    dense = {"in_features": 384, "out_features": 16, "bias": True, "activation_function": activation}
    write_layer(folder / "1_Dense" / "model.safetensors", 16, 384, "linear.")
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    edit_json(
        folder / "config_sentence_transformers.json",
        query_prefix="[unused0] ", document_prefix="[unused1] ", query_length=8, document_length=24,
        do_query_expansion=True, attend_to_expansion_tokens=False, skiplist_words=[","],
    )  # fmt: skip
    return folder


def splade(folder: Path) -> Path:
    """A small masked language model with random weights, and SPLADE's pooling."""
    build_classifier(folder, "none")
    edit_json(folder / "config.json", architectures=["BertForMaskedLM"])
    random, hidden = np.random.default_rng(0), _SHAPE["hidden_size"]
    transform = "cls.predictions.transform"
    shapes = {
        f"{transform}.dense.weight": (hidden, hidden), f"{transform}.dense.bias": (hidden,),
        f"{transform}.LayerNorm.weight": (hidden,), f"{transform}.LayerNorm.bias": (hidden,),
        "cls.predictions.bias": (_SHAPE["vocab_size"],),
    }  # fmt: skip
    head = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    tensors = load_file(folder / "model.safetensors")
    # The head is tied to the word table: NAN_WORD's row would put a NaN into every vector.
    np.nan_to_num(tensors["bert.embeddings.word_embeddings.weight"], copy=False)
    save_file({**tensors, **head}, folder / "model.safetensors")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.MLMTransformer"},
        {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": "sentence_transformers.models.SpladePooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_SpladePooling").mkdir()
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps({"pooling_strategy": "max"}))
    return folder
