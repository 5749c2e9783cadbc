"""Positions where padding tokens stand inside a text, for architectures with a `padding_id`.

The rule is `create_position_ids_from_input_ids` of transformers, for RoBERTa and the models made after it: every token
whose id is `pad_token_id` takes the padding's own row of the position table, and positions count only the other tokens.
A text that spells out `<pad>`, or a list of token ids that holds it, is valid input.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["padding_positions"]


def padding_positions(
    ids: npt.NDArray[np.int32], cu_seqlens: npt.NDArray[np.int32], padding_id: int | None, padding_row: int
) -> npt.NDArray[np.int32] | None:
    """Each token's row of the position table, int32 [T]; None if no token is padding, as in nearly every batch.

    `ids` is [T] and `cu_seqlens` [B + 1]. Padding tokens take the row `padding_row`. Sequences start at row 0.
    """
    if padding_id is None:
        return None
    is_padding = ids == padding_id
    if not is_padding.any():
        return None
    counted = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(~is_padding, out=counted[1:])  # tokens before each that are not padding
    lengths = np.diff(cu_seqlens)
    positions = counted[:-1] - np.repeat(counted[cu_seqlens[:-1]], lengths)
    positions[is_padding] = padding_row
    return positions.astype(np.int32)
