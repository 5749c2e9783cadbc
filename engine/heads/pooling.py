"""Pooling: how a sequence's hidden states become one row. Reads the mode from the model's files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from embert.engine.errors import UnsupportedModel
from embert.engine.files.json_files import read_object

__all__ = ["POOLINGS", "PoolingModule", "modes_of", "read_pooling"]

# What a user may ask for, and what encoders compute by themselves: the first token's row, the mean, the maximum of each
# column, the last token's row.
POOLINGS = ("cls", "mean", "max", "last-token")

# sentence-transformers' name of a mode → ours.
MODES = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean",
    "lasttoken": "last-token",
}
# Its first five major versions write flags instead of a mode; several are joined in this order.
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class PoolingModule(NamedTuple):
    """The settings in the `config.json` of a Pooling module."""

    pooling: str  # the mode; several, whose rows are joined, have "+" between them
    include_prompt: bool  # whether a prompt's tokens are pooled


def modes_of(pooling: str) -> tuple[str, ...]:
    """The modes whose rows are joined, in their order."""
    return tuple(pooling.split("+"))


def read_pooling(path: Path, *, replaced: bool = False) -> PoolingModule:
    """Read the `config.json` of a Pooling module. Raises BrokenModel or UnsupportedModel.

    With `replaced` the user overrides the pooling, so the mode is not read.
    """
    fields = read_object(path)
    include_prompt = bool(fields.get("include_prompt", True))
    if replaced:
        return PoolingModule("", include_prompt)
    modes = fields.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in FLAGS.items() if fields.get(flag)] or ["mean"]
    elif isinstance(modes, str):
        modes = [modes]
    if not isinstance(modes, list) or not modes or not all(isinstance(mode, str) and mode in MODES for mode in modes):
        named = " + ".join(map(str, modes)) if isinstance(modes, list) else repr(modes)
        raise UnsupportedModel(
            f"{path}: pooling_mode {named or '[]'} is not supported; supported: {', '.join(MODES)}, or several of them "
            "in a list"
        )
    return PoolingModule("+".join(MODES[mode] for mode in modes), include_prompt)
