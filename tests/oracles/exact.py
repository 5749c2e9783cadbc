"""HuggingFace in float64, and how near float32 comes to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from embert import engine
from embert.engine.tasks import Task
from tests.oracles.model_cases import byte_level

Ids = npt.NDArray[np.int32]
Doubles = npt.NDArray[np.float64]


def hidden_states(folder: Path, sequences: Sequence[Ids], **how: Any) -> list[Doubles]:
    """transformers' hidden states of each sequence, [L, hidden], by its eager attention unless `how` says otherwise."""
    arguments = {"dtype": torch.float64, "attn_implementation": "eager", **how}
    model: Any = transformers.AutoModel.from_pretrained(folder, **arguments).eval()
    with torch.inference_mode():
        return [
            model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0].double().numpy()
            for ids in sequences
        ]


def cosines(ours: npt.NDArray[np.floating], theirs: npt.NDArray[np.floating]) -> Doubles:
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    found: Doubles = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    return found


def near(folder: Path, sequences: Sequence[Ids], expected: Sequence[Doubles], *, dtype: str = "float32") -> float:
    """The smallest cosine of a token's row with the expected one. Writes a tokenizer, where there is none."""
    if not (folder / "tokenizer.json").exists():
        byte_level(300).save(str(folder / "tokenizer.json"))
    tokens = sum(map(len, sequences))
    encoder = engine.load_encoder(
        engine.load_model(str(folder)), device="cpu", dtype=dtype, max_batch_tokens=max(2048, tokens)
    )
    ours = encoder.encode(engine.pack(sequences), Task.TOKENS)
    encoder.close()
    return float(cosines(ours, np.concatenate(list(expected))).min())
