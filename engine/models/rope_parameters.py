"""Rotary positions as transformers 5 states them: the object `rope_parameters` of config.json."""

from __future__ import annotations

import dataclasses

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.encoder_config import Attention, DynamicNtk, EncoderConfig, Rotary

__all__ = ["check_pairs", "stretched", "with_rope_parameters", "with_rotary"]

FIELD = "rope_parameters"
FIELDS = ("rope_theta", "rope_type", "type", "factor", "partial_rotary_factor")
DEFAULT, DYNAMIC = "default", "dynamic"
LARGEST_FACTOR = 1000  # of longer texts: a bound for what a file can ask for
MOST_OF_ONE_PAIR = 2  # columns


def with_rope_parameters(config: ConfigFile, encoder_config: EncoderConfig, theta: float) -> EncoderConfig:
    """The config with the rotary positions that the file states. `theta` is the default of the model type.

    The kind "dynamic" stretches texts of more than `max_position_embeddings` tokens. transformers gives such models no
    longest text; here it is `factor` times as long. Raises BrokenModel or UnsupportedModel.
    """
    check_pairs(config, encoder_config)
    config.one_of("rope_scaling", (None,))  # transformers 4's name for the same object
    stated = config.with_defaults(rope_theta=theta).flattened(FIELD, FIELDS)
    kind = stated.one_of(f"{FIELD}.type", (DEFAULT, DYNAMIC), DEFAULT)
    kind = stated.one_of(f"{FIELD}.rope_type", (DEFAULT, DYNAMIC), kind)
    stated.one_of(f"{FIELD}.partial_rotary_factor", (1.0, None))
    inner = f"{FIELD}.rope_theta"
    rotary = Rotary(stated.number(inner if inner in stated.fields else "rope_theta"), encoder_config.head_size)
    if kind == DEFAULT:
        return with_rotary(encoder_config, rotary)
    factor = stated.number(f"{FIELD}.factor")
    if not 1 <= factor <= LARGEST_FACTOR:
        raise BrokenModel(f"{config.path}: {FIELD}.factor must be 1 to {LARGEST_FACTOR}, found {factor:g}")
    trained = encoder_config.max_positions
    rotary = stretched(config, rotary, DynamicNtk(factor, trained))
    return dataclasses.replace(with_rotary(encoder_config, rotary), max_positions=int(factor * trained))


def stretched(config: ConfigFile, rotary: Rotary, scaling: DynamicNtk) -> Rotary:
    """The same positions, by the length of each text. Raises UnsupportedModel for one pair, which has no such rule."""
    if rotary.columns <= MOST_OF_ONE_PAIR:
        raise UnsupportedModel(
            f"{config.path}: positions stretched by a text's length need heads of which more than {MOST_OF_ONE_PAIR} "
            f"columns rotate, found {rotary.columns}"
        )
    return dataclasses.replace(rotary, scaling=scaling)


def with_rotary(encoder_config: EncoderConfig, rotary: Rotary) -> EncoderConfig:
    """The architecture with the same rotary positions in every layer, and no table of positions."""
    attention = (Attention(rotary),) * encoder_config.layers
    return dataclasses.replace(encoder_config, position_table=False, attention=attention)


def check_pairs(config: ConfigFile, encoder_config: EncoderConfig) -> None:
    """Raise UnsupportedModel where a head has an odd number of columns."""
    if encoder_config.head_size % 2:
        raise UnsupportedModel(
            f"{config.path}: rotary positions rotate pairs of a head's columns, and {config.name('hidden_size')} / "
            f"{config.name('num_attention_heads')} is {encoder_config.head_size}"
        )
