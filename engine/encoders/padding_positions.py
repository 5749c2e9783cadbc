"""Where padding tokens inside a text put the others: RoBERTa's rule, and that of the models made after it.

HuggingFace gives every token whose id is `pad_token_id` one position, the padding's own, and counts only the others.
A text that spells out `<pad>`, or a list of token ids that holds it, is no error: the model was defined so.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["padding_positions"]


def padding_positions(
    ids: npt.NDArray[np.int32], cu_seqlens: npt.NDArray[np.int32], padding_id: int | None, padding_row: int
) -> npt.NDArray[np.int32] | None:
    """Each token's row of the position table, int32 [T]; None where no token is padding, as in nearly every batch.

    `padding_row` is the row that padding tokens take. Texts start at row 0 of the table.
    """
    if padding_id is None:
        return None
    is_padding = ids == padding_id
    if not is_padding.any():
        return None
    counted = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(~is_padding, out=counted[1:])  # tokens that are not padding, before each
    lengths = np.diff(cu_seqlens)
    positions = counted[:-1] - np.repeat(counted[cu_seqlens[:-1]], lengths)
    positions[is_padding] = padding_row
    return positions.astype(np.int32)
