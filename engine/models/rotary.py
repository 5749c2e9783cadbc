"""Rotary positions in config.json, as transformers 5 reads them: `modeling_rope_utils.py` has the rules."""

from __future__ import annotations

import dataclasses
import math

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.models.config_file import ConfigFile
from embert.engine.models.encoder_config import Attention, DynamicNtk, EncoderConfig, Linear, Llama3, Ntk, Rotary, Yarn

ROPE = "rope_parameters"
DEFAULT, LINEAR, DYNAMIC, LLAMA3, YARN = "default", "linear", "dynamic", "llama3", "yarn"
FIELDS = ("rope_theta", "rope_type", "type", "factor", "partial_rotary_factor")
# Fields of each kind of scaling, in addition to FIELDS.
SCALING_FIELDS: dict[str, tuple[str, ...]] = {
    DEFAULT: (),
    LINEAR: (),
    DYNAMIC: (),
    LLAMA3: ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    YARN: (
        "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "truncate",
    ),
}  # fmt: skip
LARGEST_FACTOR = 1000  # of longer texts: a bound for what a file can ask for
MOST_OF_ONE_PAIR = 2  # columns


def with_rope_parameters(config: ConfigFile, encoder_config: EncoderConfig, theta: float) -> EncoderConfig:
    """An encoder's config with the rotary positions that the file states. `theta` is the default of the model type.

    The kind "dynamic" stretches texts of more than `max_position_embeddings` tokens. transformers gives such models no
    longest text; here it is `factor` times as long. Raises BrokenModel or UnsupportedModel.
    """
    rotary = read_rotary(config, encoder_config.head_size, theta)
    scaling, longest = rotary.scaling, encoder_config.max_positions
    if isinstance(scaling, DynamicNtk):
        longest = int(scaling.factor * longest)
    return dataclasses.replace(with_rotary(encoder_config, rotary), max_positions=longest)


def with_rotary(encoder_config: EncoderConfig, rotary: Rotary) -> EncoderConfig:
    """The architecture with the same rotary positions in every layer, and no table of positions."""
    attention = (Attention(rotary),) * encoder_config.layers
    return dataclasses.replace(encoder_config, position_table=False, attention=attention)


def rotary_of(config: ConfigFile, theta: float, columns: int, scaling: Ntk | DynamicNtk | None = None) -> Rotary:
    """Rotary positions of the first `columns` of a head.

    Raises UnsupportedModel for an odd number of columns, and for one pair that is stretched by a text's length, which
    no model defines.
    """
    if columns % 2:
        raise UnsupportedModel(f"{config.path}: rotary positions rotate pairs of a head's columns, found {columns}")
    if isinstance(scaling, DynamicNtk) and columns <= MOST_OF_ONE_PAIR:
        raise UnsupportedModel(
            f"{config.path}: positions stretched by a text's length need heads of which more than {MOST_OF_ONE_PAIR} "
            f"columns rotate, found {columns}"
        )
    return Rotary(theta, columns, scaling)


def read_rotary(config: ConfigFile, columns: int, theta: float, kind: str = "") -> Rotary:
    """The rotary positions that the file states in `rope_parameters`, or in transformers 4's `rope_scaling`.

    θ may stand next to them. With `kind` they are those of one type of layers: "rope_parameters.{kind}". `theta` is the
    model type's default. Raises BrokenModel or UnsupportedModel.
    """
    older = config.fields.get("rope_scaling")
    field = "rope_scaling" if older else f"{ROPE}.{kind}" if kind else ROPE
    supported = tuple(dict.fromkeys((*FIELDS, *(name for names in SCALING_FIELDS.values() for name in names))))
    rope = config.with_defaults(rope_theta=theta).flatten(field, supported)
    scaling = rope.one_of(f"{field}.type", tuple(SCALING_FIELDS), DEFAULT)
    scaling = rope.one_of(f"{field}.rope_type", tuple(SCALING_FIELDS), scaling)
    for inner in supported:
        if inner not in (*FIELDS, *SCALING_FIELDS[scaling]) and rope.fields.get(f"{field}.{inner}") is not None:
            raise UnsupportedModel(f"{config.path}: {field}.{inner} is not supported with rope_type {scaling!r}")
    for name in (f"{field}.partial_rotary_factor", "partial_rotary_factor"):
        rope.one_of(name, (1.0, None))
    inner_theta = f"{field}.rope_theta"
    theta = rope.number(inner_theta if rope.fields.get(inner_theta) is not None else "rope_theta")
    plain = rotary_of(config, theta, columns)
    if scaling == DEFAULT:
        return plain
    if scaling == DYNAMIC:
        dynamic = DynamicNtk(_factor(rope, field), rope.integer("max_position_embeddings"))
        return rotary_of(config, theta, columns, dynamic)
    return dataclasses.replace(plain, scaling=_scaling(rope, field, scaling))


def _scaling(rope: ConfigFile, field: str, kind: str) -> Linear | Llama3 | Yarn:
    """`_compute_…_parameters` of transformers' modeling_rope_utils.py read the same fields."""
    factor = _factor(rope, field)
    if kind == LINEAR:
        return Linear(factor)
    trained_name = f"{field}.original_max_position_embeddings"
    trained = rope.integer(trained_name if rope.fields.get(trained_name) is not None else "max_position_embeddings")
    if kind == LLAMA3:
        low, high = (rope.number(f"{field}.{name}_freq_factor") for name in ("low", "high"))
        if low >= high:
            raise BrokenModel(f"{rope.path}: {field}.low_freq_factor {low:g} must be below high_freq_factor {high:g}")
        return Llama3(factor, low, high, trained)

    def optional(name: str, default: float) -> float:
        return rope.number(f"{field}.{name}") if rope.fields.get(f"{field}.{name}") else default

    scales = [optional(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    attention_factor = _magnitude(factor, 1.0)
    if all(scales):
        attention_factor = _magnitude(factor, scales[0]) / _magnitude(factor, scales[1])
    return Yarn(
        factor,
        trained,
        optional("attention_factor", attention_factor),
        optional("beta_fast", 32.0),
        optional("beta_slow", 1.0),
        rope.one_of(f"{field}.truncate", (True, False), True),
    )


def _factor(rope: ConfigFile, field: str) -> float:
    factor = rope.number(f"{field}.factor")
    if not 1 <= factor <= LARGEST_FACTOR:
        raise BrokenModel(f"{rope.path}: {field}.factor must be 1 to {LARGEST_FACTOR}, found {factor:g}")
    return factor


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
