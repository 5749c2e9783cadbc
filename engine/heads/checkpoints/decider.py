"""Reads how a language model decides: its chat template, and the tokens of the labels that begin its reply."""

from __future__ import annotations

import dataclasses
import itertools
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embert.engine.errors import UnsupportedModel
from embert.engine.files.chat_template import PairText
from embert.engine.heads.checkpoints.classifier import vocabulary_layer
from embert.engine.heads.description import Classifier, LabelDecider
from embert.engine.models.encoder_config import EncoderConfig

MOST_LABELS = 255
LETTERS = string.ascii_uppercase


def read_label_decider(
    weights: Path, fields: Mapping[str, Any], encoder_config: EncoderConfig, tokenizer: Path, pair_text: PairText
) -> LabelDecider:
    """`fields` are those of config.json in the folder `weights`; `tokenizer` is the path of tokenizer.json.

    Raises BrokenModel, and UnsupportedModel where a letter is not one token at the beginning of a reply.
    """
    vocabulary = vocabulary_layer(weights, dict(fields), encoder_config)
    labels = label_tokens(tokenizer, pair_text.after)
    rows = dataclasses.replace(vocabulary, outputs=len(labels), rows=tuple(labels.values()))
    return LabelDecider(Classifier((rows,), tuple(labels), "softmax", "last-token"), vocabulary)


def label_tokens(path: Path, end: str) -> dict[str, int]:
    """The labels and their ids: A to Z, then codes of two letters, as far as they are one token behind `end`."""
    from tokenizers import Tokenizer as Library  # other models do without

    library = Library.from_file(str(path))
    candidates = [*LETTERS, *map("".join, itertools.product(LETTERS, repeat=2))]
    texts = ["", *candidates]
    before, *found = (
        each.ids for each in library.encode_batch([end + text for text in texts], add_special_tokens=False)
    )
    labels = {
        label: ids[-1]
        for label, ids in zip(candidates, found, strict=True)
        if len(ids) == len(before) + 1 and ids[:-1] == before
    }
    if missing := [letter for letter in LETTERS if letter not in labels]:
        raise UnsupportedModel(
            f"{path}: the letter {missing[0]} is not one token at the beginning of a reply, and decisions read letters"
        )
    return dict(itertools.islice(labels.items(), MOST_LABELS))
