"""A request for pairs, and the checks that all three forms share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embert.engine.errors import InputError
from embert.engine.tokenization.backend import ID_BYTES
from embert.engine.tokenization.encoded import Chunking, Direction, TokenizeOptions


@dataclass(frozen=True, slots=True)
class PairRequest:
    """Texts that form pairs. Raises InputError unless there is one first text, or as many as second ones."""

    firsts: Sequence[str]
    seconds: Sequence[str]
    options: TokenizeOptions
    chunking: Chunking

    def __post_init__(self) -> None:
        if len(self.firsts) not in (1, len(self.seconds)):
            raise InputError(
                f"has {len(self.firsts)} texts and `{self.options.second_param}` has {len(self.seconds)}; "
                "the former must have one text, or as many as the latter",
                param=self.options.param,
            )


def check_tokens(lengths: npt.NDArray[np.int32], options: TokenizeOptions) -> None:
    """Raise InputError for a pair of two empty texts, where nothing is put around them."""
    if not lengths.all():
        index = int(lengths.argmin())
        raise InputError("has no tokens", param=options.second_param, subject=f"pair {index}", kind="tokenizer")


def cut(body: bytes, tokens: int, direction: Direction) -> bytes:
    """The ids of a text without those over a number of tokens."""
    size = tokens * ID_BYTES
    return body[:size] if direction == "right" else body[len(body) - size :]
