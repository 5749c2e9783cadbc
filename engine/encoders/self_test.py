"""The self test of an encoder before it serves: compares the device with numpy, and checks for finite rows.

An encoder whose kernels are built for another GPU, do nothing, or read the wrong weights still returns vectors of the
right shape. `self_test_ids`, `vector_of` and `mismatch` find that; the other side of the comparison is reference.py.
`tasks_never_finite` finds tasks whose every request would fail.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine.batch import pack
from embert.engine.encoders.base import Encoder
from embert.engine.encoders.reference import hidden_state
from embert.engine.model import Model
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.tasks import NO_TASK, Task
from embert.engine.weights.checkpoint import Checkpoint

__all__ = ["mismatch", "self_test_ids", "tasks_never_finite", "vector_of"]

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

TEST_LENGTH = 5
PAST_WINDOW = 16  # tokens
# Relative errors far above rounding, which is about 1e-3 in float16 and 1e-2 in bfloat16. Kernels that do not run, or
# run on other weights, are off by the vector's own length.
TOLERANCE = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.3, "int8": 0.3}
FIELD = '"post_processor":'
TEXTS, LENGTH = 4, 5  # several, because a checkpoint may have a bad row for a rare token; tokens without special ones


def self_test_ids(config: EncoderConfig) -> Ints:
    """A few tokens spread over the vocabulary, none of them padding: int32 [L]. No window holds them all."""
    windows = (config.attention_of(layer).window for layer in range(config.layers))
    widest = max((window + PAST_WINDOW for window in windows if window is not None), default=0)
    return spread_ids(config, max(TEST_LENGTH, widest))


def spread_ids(config: EncoderConfig, length: int) -> Ints:
    """So many tokens, or as many as the model reads, spread over the vocabulary, none of them padding: int32 [L]."""
    length = min(length, config.max_positions)
    ids = (np.arange(length) * 2 + 1) * config.vocab_size // (2 * length)
    if config.padding_id is not None:
        ids[ids == config.padding_id] = 0 if config.padding_id > 0 else config.vocab_size - 1
    return ids.astype(np.int32)


def vector_of(ids: Ints, config: EncoderConfig, checkpoint: Checkpoint, pooling: str, adapter: int = -1) -> Floats:
    """The pooled last hidden state of token ids [L] with an adapter, -1: none. Not normalized: float32 [hidden]."""
    x = hidden_state(ids, config, checkpoint, adapter)
    pooled: Floats = {
        "cls": lambda: x[0],
        "mean": lambda: x.mean(0),
        "max": lambda: x.max(0),
        "last-token": lambda: x[-1],
    }[pooling]()
    return pooled.astype(np.float32, copy=False)


def mismatch(got: Floats, expected: Floats, dtype: str) -> str | None:
    """Why `got` [hidden] cannot be the `expected` vector, in half a sentence; None if it can."""
    if not np.isfinite(got).all():
        return "its vector is not finite"
    if not got.any():
        return "its vector is all zeros"
    length = float(np.linalg.norm(expected))
    error = float(np.linalg.norm(got - expected)) / max(length, 1e-12)
    if error <= TOLERANCE[dtype]:
        return None
    return f"its vector is {error:.2g} of its length off, at most {TOLERANCE[dtype]:g} is rounding"


def tasks_never_finite(model: Model, encoder: Encoder) -> Task:
    """The tasks whose every request will fail: none of the texts gets finite rows. Raises EncoderError."""
    special = _special_ids(model)
    texts = np.array_split(spread_ids(model.config, TEXTS * LENGTH), TEXTS)
    batch = pack([np.concatenate([special, text])[: model.max_input_length] for text in texts if len(text)])
    never = NO_TASK
    for task, rows in encoder.wait(encoder.submit(batch.wanting(model.tasks))).items():
        if all(rows.slice(index, index + 1).first_not_finite() is not None for index in range(rows.sequences)):
            never |= task
    return never


def _special_ids(model: Model) -> npt.NDArray[np.int32]:
    """The special ids around every text: a bad row of one of these fails every request. int32 [n]."""
    # Parsing the whole file, with its vocabulary, would take a quarter of a second and 60 MB for a large one.
    _, _, rest = (model.transformer_folder / "tokenizer.json").read_bytes().decode(errors="replace").partition(FIELD)
    try:
        processor, _ = json.JSONDecoder().raw_decode(rest.lstrip())
    except (ValueError, RecursionError):  # the tokenizer's reader reports the error
        processor = None
    ids = {i for i in _ids_of(processor) if type(i) is int and 0 <= i < model.config.vocab_size}
    return np.array(sorted(ids), np.int32)


def _ids_of(processor: Any) -> list[Any]:
    """The ids that a post-processor of tokenizer.json adds to a single text."""
    try:
        match processor["type"]:
            case "Sequence":
                return [i for member in processor["processors"] for i in _ids_of(member)]
            case "BertProcessing" | "RobertaProcessing":
                return [processor["cls"][1], processor["sep"][1]]
            case "TemplateProcessing":
                names = [piece["SpecialToken"]["id"] for piece in processor["single"] if "SpecialToken" in piece]
                return [i for name in names for i in processor["special_tokens"][name]["ids"]]
    except (TypeError, LookupError):
        pass
    return []
