"""A test of an encoder that is about to serve: which tasks have a finite row for any of a few texts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine.encoders.base import Encoder
from embert.engine.encoders.known_text import spread_ids
from embert.engine.model import Model
from embert.engine.packing import pack
from embert.engine.tasks import NO_TASK, Task

__all__ = ["tasks_never_finite"]

FIELD = '"post_processor":'
TEXTS, LENGTH = 4, 5  # several, because a checkpoint may have a bad row for a rare token; tokens without special ones


def tasks_never_finite(model: Model, encoder: Encoder) -> Task:
    """The tasks whose every request will fail: none of the texts gets finite rows. Raises EncoderError."""
    special = _special_ids(model)
    texts = np.array_split(spread_ids(model.architecture, TEXTS * LENGTH), TEXTS)
    batch = pack([np.concatenate([special, text])[: model.max_input_length] for text in texts if len(text)])
    never = NO_TASK
    for task, rows in encoder.wait(encoder.submit(batch.wanting(model.tasks))).items():
        if all(rows.slice(index, index + 1).first_not_finite() is not None for index in range(rows.sequences)):
            never |= task
    return never


def _special_ids(model: Model) -> npt.NDArray[np.int32]:
    """The ids that stand around every text: a bad row of one of these fails every request. int32 [n]."""
    # Parsing the whole file, with its vocabulary, would take a quarter of a second and 60 MB for a large one.
    _, _, rest = (model.transformer_folder / "tokenizer.json").read_bytes().decode(errors="replace").partition(FIELD)
    try:
        processor, _ = json.JSONDecoder().raw_decode(rest.lstrip())
    except (ValueError, RecursionError):  # the tokenizer's own reader says what is wrong
        processor = None
    ids = {i for i in _ids_of(processor) if type(i) is int and 0 <= i < model.architecture.vocab_size}
    return np.array(sorted(ids), np.int32)


def _ids_of(processor: Any) -> list[Any]:
    """What a post-processor of tokenizer.json puts around a single text."""
    try:
        match processor["type"]:
            case "Sequence":
                return [i for each in processor["processors"] for i in _ids_of(each)]
            case "BertProcessing" | "RobertaProcessing":
                return [processor["cls"][1], processor["sep"][1]]
            case "TemplateProcessing":
                names = [piece["SpecialToken"]["id"] for piece in processor["single"] if "SpecialToken" in piece]
                return [i for name in names for i in processor["special_tokens"][name]["ids"]]
    except (TypeError, LookupError):
        pass
    return []
