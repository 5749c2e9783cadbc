"""Small models with random weights: one for each server of docs/clients.md, but for the embeddings, which are real."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from embert import engine
from tests.oracles.model_cases import build, write_modules
from tests.server.models import copy_model

LABELS = ("calm", "cross", "curious")
ENTITIES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
NLI = ("contradiction", "neutral", "entailment")


def _build(folder: Path, head: str, **config: Any) -> Path:
    """A BERT that transformers writes, with the default model's tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(engine.load_model().folder, model_max_length=256)
    build(folder, "bert", vocab_size=len(tokenizer), head=head, modules=False, max_position_embeddings=256, **config)
    tokenizer.save_pretrained(folder)
    return folder


def _labeled(head: str, labels: Sequence[str]) -> Callable[[Path], Path]:
    names = dict(enumerate(labels))
    numbers = {label: number for number, label in names.items()}
    return functools.partial(_build, head=head, id2label=names, label2id=numbers)


def _splade(folder: Path) -> Path:
    """Saved by sentence-transformers."""
    from sentence_transformers import SparseEncoder

    SparseEncoder(str(_build(folder / "made", "ForMaskedLM")), device="cpu").save_pretrained(str(folder / "saved"))
    return folder / "saved"


def _colbert(folder: Path) -> Path:
    """Saved by sentence-transformers."""
    from sentence_transformers import MultiVectorEncoder

    torch.manual_seed(0)
    made = MultiVectorEncoder(str(_build(folder / "made", "Model")), device="cpu")
    made.save_pretrained(str(folder / "saved"))
    return folder / "saved"


def _bge_m3(folder: Path) -> Path:
    """A dense model, with two further heads in separate files."""
    write_modules(_build(folder, "Model"), pooling="cls")
    for name, rows in (("sparse_linear", 1), ("colbert_linear", 64)):
        save_file({"weight": torch.randn(rows, 64) * 0.2, "bias": torch.randn(rows)}, folder / f"{name}.safetensors")
    return folder


# --served-model-name → what writes its files into a folder, and gives the folder to serve
BUILD: dict[str, Callable[[Path], Path]] = {
    "minilm": copy_model,
    "reranker": functools.partial(_build, head="ForSequenceClassification", num_labels=1),
    "classifier": _labeled("ForSequenceClassification", LABELS),
    "splade": _splade,
    "bge-m3": _bge_m3,
    "colbert": _colbert,
    "tagger": _labeled("ForTokenClassification", ENTITIES),
    "nli": _labeled("ForSequenceClassification", NLI),
}
