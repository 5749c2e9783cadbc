"""Model folders for tests: the default model, copied by links and then changed; and small classifiers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from embert import engine

__all__ = ["build_classifier", "copy_model", "edit_json"]


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


# A BERT as small as can be, with the default model's tokenizer.
_SHAPE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 128, "type_vocab_size": 2, "vocab_size": 30522, "layer_norm_eps": 1e-12,
    "hidden_act": "gelu", "pad_token_id": 0,
}  # fmt: skip


def build_classifier(folder: Path, *labels: str, seed: int = 0) -> Path:
    """A BertForSequenceClassification with these labels; one: a cross-encoder. The seed alone makes its weights."""
    source = engine.load_model().transformer_folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    names = {str(index): label for index, label in enumerate(labels)}
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "id2label": names,
        "label2id": {label: int(index) for index, label in names.items()},
        **_SHAPE,
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    tensors = {
        name: (random.standard_normal(shape) * scale + offset).astype(np.float32)
        for name, shape, scale, offset in _tensors(len(labels))
    }
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
