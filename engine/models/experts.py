"""Experts of nomic-embed-text-v2-moe, as `config.json` states them."""

from __future__ import annotations

from embert.engine.errors import UnsupportedModel
from embert.engine.models.config_file import MOST, ConfigFile
from embert.engine.models.encoder_config import EncoderConfig, Experts

MOST_EXPERTS = 256
# Options of experts that no encoder here computes → the values that turn them off.
LEFT_OUT: dict[str, tuple[object, ...]] = {
    "hidden_act": ("gelu",),
    **dict.fromkeys(("expert_choice_router", "moe_normalize_expert_weights"), (False, None)),
    "num_shared_experts": (0, None),
    "ffn_div": (1, None),
}


def read_experts(config: ConfigFile, described: EncoderConfig) -> Experts | None:
    """The experts of layers 1, 1 + n, 1 + 2n, … for n `moe_every_n_layers`; None where there are none.

    `described` is the same model without experts. Raises BrokenModel or UnsupportedModel.
    """
    if config.fields.get("moe_every_n_layers") in (0, None):
        config.one_of("num_experts", (0, 1, None))
        return None
    every = config.integer("moe_every_n_layers")
    if every == 1:
        raise UnsupportedModel(f"{config.path}: moe_every_n_layers must be at least 2, found 1")
    for field, values in LEFT_OUT.items():
        config.one_of(field, values)
    count, inner = config.integer("num_experts", MOST_EXPERTS), described.intermediate_size
    if count * inner > MOST:
        name = config.name("intermediate_size")
        raise UnsupportedModel(f"{config.path}: num_experts {count} times {name} {inner} must be at most {MOST}")
    return Experts(count, config.integer("moe_top_k", count), tuple(range(1, described.layers, every)))
