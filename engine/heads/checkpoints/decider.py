"""Reads how a model decides: a language model by the labels that begin its reply, Laya by markers before options.

Laya's folder has rl_agent_config.json, the encoder's config.json in encoder/, the tokenizer in tokenizer/, and all
weights in model.safetensors.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.chat_template import PairText
from embert.engine.files.json_files import positive_int, read_object
from embert.engine.heads.checkpoints.classifier import vocabulary_layer
from embert.engine.heads.checkpoints.stored import Vocabulary, check_layer, stored_tensors
from embert.engine.heads.description import Classifier, LabelDecider, Layer, MarkerDecider
from embert.engine.models.encoder_config import EncoderConfig
from embert.engine.models.tensor_names import (
    FINAL_NORM,
    TOKEN_TYPE_EMBEDDINGS,
    WORD_EMBEDDINGS,
    FusedWeight,
    TensorNames,
    WeightMapping,
)

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


LAYA = "rl_agent_config.json"
LAYA_SIZES = {"head_layers": 2, "max_len": 512, "head_max_len": 192}  # and what Laya takes for them
LAYA_TYPES = ("choice", "score", "noul")  # of questions, in the order of their embeddings
HEAD_SIZE = 64  # columns of an attention head
NORM_EPS = 1e-5
LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.5, 5.0

# The names of torch's TransformerEncoderLayer.
LAYERS = WeightMapping(
    parts={
        **{
            f"attention.self.{name}.{kind}": FusedWeight(f"self_attn.in_proj_{kind}", part, 3)
            for part, name in enumerate(("query", "key", "value"))
            for kind in ("weight", "bias")
        },
        "attention.output.dense": "self_attn.out_proj",
        "attention.output.LayerNorm": "norm1",
        "intermediate.dense": "linear1",
        "output.dense": "linear2",
        "output.LayerNorm": "norm2",
        FINAL_NORM: "scorer.0",
        TOKEN_TYPE_EMBEDDINGS.removesuffix(".weight"): "type_emb",
    },
    prefixes=("head.",),
    layers="layers.",
)


def read_marker_decider(folder: Path, encoder: EncoderConfig) -> MarkerDecider:
    """Laya's head on the encoder in `folder`. Raises BrokenModel or UnsupportedModel."""
    path = folder / LAYA
    fields = {**LAYA_SIZES, **read_object(path)}
    head_layers, most_tokens, question_tokens = (positive_int(path, fields, name) or 0 for name in LAYA_SIZES)
    hidden, vocabulary = encoder.hidden_size, Vocabulary(folder / "tokenizer")
    if hidden % max(1, hidden // HEAD_SIZE):
        raise UnsupportedModel(
            f"{path}: hidden states of {hidden} columns, which {hidden // HEAD_SIZE} heads do not share"
        )
    tokens = {kind: vocabulary.special(f"{kind}_token") for kind in ("mask", "cls", "sep")}
    ids = {kind: None if token is None else vocabulary.id(token) for kind, token in tokens.items()}
    for kind, token_id in ids.items():
        if token_id is None:
            raise BrokenModel(f"{folder / 'tokenizer'} has no {kind}_token, which rows of decisions need")
    stored = stored_tensors(folder)
    scorer = (
        Layer("scorer.1", "", hidden, hidden, True, "gelu"),
        Layer("scorer.3", "", hidden, 1, True, "identity"),
    )
    for layer in scorer:
        check_layer(stored, layer)
    layers = EncoderConfig(
        model_type="laya",
        vocab_size=1,
        hidden_size=hidden,
        layers=head_layers,
        heads=max(1, hidden // HEAD_SIZE),
        intermediate_size=4 * hidden,
        activation="relu",
        max_positions=encoder.max_positions,
        type_vocab_size=len(LAYA_TYPES),
        layer_norm_eps=NORM_EPS,
        tensors=TensorNames((LAYERS,), absent=frozenset({WORD_EMBEDDINGS})),
        position_table=False,
        embedding_norm=False,
        continues=True,
        pre_norm=True,
    )
    return MarkerDecider(
        config=layers,
        scorer=scorer,
        marker=int(ids["mask"] or 0),
        first=int(ids["cls"] or 0),
        separator=int(ids["sep"] or 0),
        marker_text=str(tokens["mask"]),
        most_tokens=min(most_tokens, encoder.max_positions),
        question_tokens=question_tokens,
        temperatures=_temperatures(fields),
    )


def _temperatures(fields: Mapping[str, Any]) -> dict[str, float]:
    """Temperatures by type, and by type and number of options. Laya sharpens by no more than LEAST_TEMPERATURE."""
    by_type, by_options = fields.get("temperature"), fields.get("temperature_by_options")
    found = dict(zip(LAYA_TYPES, by_type, strict=False)) if isinstance(by_type, list) else {}
    found |= by_options if isinstance(by_options, dict) else {}
    return {name: _clamp(value) for name, value in found.items()}


def _clamp(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return min(max(float(value), LEAST_TEMPERATURE), MOST_TEMPERATURE) if is_number else 1.0  # type: ignore[arg-type]
