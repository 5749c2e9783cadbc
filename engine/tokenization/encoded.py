"""Output of tokenization: packed token ids, or tokens with their offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Direction", "Encoded", "TokenInfo"]

Direction = Literal["right", "left"]  # the end that is cut off


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of B texts, or pairs of texts, laid end to end."""

    ids: npt.NDArray[np.int32]  # [T]
    lengths: npt.NDArray[np.int32]  # [B], each 1 … max_input_length
    truncated: int  # how many of the B texts were cut
    token_types: npt.NDArray[np.int32] | None = None  # [T]; None means all 0
    adapter: int = -1  # the place in Adapters.names of the one that they are for; -1: none
    prompt_tokens: int = 0  # [B], number of first tokens that are not pooled

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return len(self.ids)

    @property
    def sequences(self) -> int:
        """B, the number of texts."""
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One token of a text. `start` and `stop` count characters, and are None for special tokens."""

    id: int
    text: str  # the characters it stands for; a special token's own name
    special: bool
    start: int | None
    stop: int | None
