"""HuggingFace's logits of the model that a server serves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from tests.server.live import Live

Floats = npt.NDArray[np.float64]


def model_folder(server: Live) -> str:
    """The folder that a server was started with."""
    return str(server.get("/info").json()["model_id"])


@cache
def _loaded(folder: str) -> tuple[Any, Any]:
    made: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return transformers.AutoTokenizer.from_pretrained(folder), made.eval()


def logits_of(server: Live, texts: Sequence[tuple[str, ...]], *, side: str = "right") -> Floats:
    """[n, labels] for texts of one or two each, one at a time, so without padding.

    A pair that is too long is cut in its longer text, at this `side`.
    """
    tokenizer, model = _loaded(model_folder(server))
    tokenizer.truncation_side = side
    rows = []
    with torch.inference_mode():
        for text in texts:
            most = model.config.max_position_embeddings
            # In lists, as CrossEncoder calls it: a second text that is empty would count as none.
            inputs = tokenizer(
                *([each] for each in text), return_tensors="pt", truncation="longest_first", max_length=most
            )
            rows.append(model(**inputs).logits[0].double().numpy())
    return np.array(rows)


def sigmoid(logits: Floats) -> Floats:
    values: Floats = 1 / (1 + np.exp(-logits))
    return values


def softmax(logits: Floats) -> Floats:
    """Along the last axis."""
    values: Floats = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return values
