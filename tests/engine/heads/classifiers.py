"""Classification models with random weights, and HuggingFace's logits to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.engine.conftest import Floats, Ids, small_tokenizer
from tests.oracles.model_cases import build

__all__ = ["build_classifier", "hugging_face_logits"]


def build_classifier(folder: Path, case: str = "bert", *, labels: int = 3, vocab_size: int = 99, **config: Any) -> Path:
    """A folder as transformers writes it, with a tokenizer of single characters."""
    names = {"id2label": {i: f"label {i}" for i in range(labels)}, "label2id": {f"label {i}": i for i in range(labels)}}
    build(folder, case, vocab_size=vocab_size, head="ForSequenceClassification", modules=False, **{**names, **config})
    small_tokenizer(99).save(str(folder / "tokenizer.json"))
    return folder


def hugging_face_logits(folder: Path, sequences: Sequence[Ids], token_types: Sequence[Ids] | None = None) -> Floats:
    """transformers' float32 logits, one sequence at a time, so without padding: float32 [n, labels]."""
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for index, ids in enumerate(sequences):
        inputs = {"input_ids": ids} if token_types is None else {"input_ids": ids, "token_type_ids": token_types[index]}
        with torch.inference_mode():
            rows.append(model(**{name: torch.from_numpy(each[None].astype(np.int64)) for name, each in inputs.items()}))
    logits: Floats = np.concatenate([row.logits.numpy() for row in rows])
    return logits
