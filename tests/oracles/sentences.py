"""sentence-transformers' results. Tests import it from here when they need it: the import takes 10 s of CPU time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]


def sentence_transformer(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def embeddings(folder: Path, texts: Sequence[str], **options: Any) -> Floats:
    """Vectors of texts that are encoded one at a time, so without padding."""
    oracle = sentence_transformer(folder)
    return np.concatenate([oracle.encode([text], **options) for text in texts])


def cross_encoder(folder: Path | None, **options: Any) -> Any:
    """Reads a folder, or is made of `modules`."""
    from sentence_transformers import CrossEncoder

    return CrossEncoder(None if folder is None else str(folder), device="cpu", **options)


def logits(folder: Path, pairs: Sequence[tuple[str, str]]) -> Floats:
    """Logits of pairs that are read one at a time, so without padding: [n], or [n, labels]."""
    oracle = cross_encoder(folder, activation_fn=torch.nn.Identity())
    return np.stack([oracle.predict([pair])[0] for pair in pairs])
