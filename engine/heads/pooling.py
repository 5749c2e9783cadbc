"""Pooling: how a sequence's hidden states become one row. This file reads which way a model asks for."""

from __future__ import annotations

from pathlib import Path

from embert.engine.errors import UnsupportedModel
from embert.engine.files.json_files import read_object

__all__ = ["POOLINGS", "read_pooling"]

# The first token's row, the mean, the maximum of each column, the last token's row.
POOLINGS = ("cls", "mean", "max", "last-token")

# sentence-transformers' name → ours. Its other modes (mean_sqrt_len_tokens, weightedmean) are rare and not built.
MODES = {"cls": "cls", "max": "max", "mean": "mean", "lasttoken": "last-token"}
# Its first five major versions write flags instead of a mode.
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def read_pooling(path: Path) -> str:
    """One of POOLINGS, from the `config.json` of a Pooling module. Raises BrokenModel or UnsupportedModel."""
    fields = read_object(path)
    modes = fields.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in FLAGS.items() if fields.get(flag)] or ["mean"]
    elif isinstance(modes, str):
        modes = [modes]
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in MODES:
        named = " + ".join(map(str, modes)) if isinstance(modes, list) else repr(modes)
        raise UnsupportedModel(
            f"{path}: pooling {named} is not supported; supported: one of {', '.join(MODES)} "
            "(or state the pooling yourself)"
        )
    if not fields.get("include_prompt", True):
        raise UnsupportedModel(f"{path}: include_prompt false is not supported; supported: true")
    return MODES[modes[0]]
