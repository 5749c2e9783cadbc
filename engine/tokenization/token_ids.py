"""Packs token ids: of texts, with special tokens around them; and of clients, after validation."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embert.engine.errors import BrokenModel, InputError
from embert.engine.heads.description import Role
from embert.engine.tokenization.backend import ID_BYTES, Backend
from embert.engine.tokenization.chunks import Chunks
from embert.engine.tokenization.encoded import Direction, Encoded
from embert.engine.tokenization.input_errors import bad_id, too_long

__all__ = ["CHUNK_IDS", "Frame", "check_ids", "pack_ids"]

CHUNK_IDS = 16_384  # ids of a chunk


@dataclass(frozen=True, slots=True)
class Frame:
    """The special ids around a text, a query or a document, and the limit of tokens.

    Ids are bytes, as in the backend.
    """

    before: bytes
    after: bytes
    limit: int  # tokens at most, all included
    filler: bytes = b""  # one id, put at the end of a shorter sequence …
    filled: int = 0  # … until it has so many tokens

    @classmethod
    def of(cls, backend: Backend, limit: int, role: Role | None = None) -> Frame:
        """The frame of texts in a role. Raises BrokenModel where it leaves no space for a text."""
        before, after = backend.special.prefix, backend.special.suffix
        if role is None:
            return cls(before, after, limit)._checked()
        marker = b"" if role.marker is None else _ids(role.marker)
        limit = limit if role.length is None else min(limit, role.length)
        if role.expansion is None:
            return cls(before + marker, after, limit)._checked()
        return cls(before + marker, after, limit, _ids(role.expansion.token), role.expansion.length)._checked()

    @property
    def overhead(self) -> int:
        """Tokens before and after a text."""
        return (len(self.before) + len(self.after)) // ID_BYTES

    @property
    def capacity(self) -> int:
        """Tokens of the text itself that fit."""
        return self.limit - self.overhead

    def within(self, limit: int | None) -> Frame:
        """The same, with at most so many tokens where these are fewer. Raises BrokenModel if they leave no space."""
        return self if limit is None or limit >= self.limit else dataclasses.replace(self, limit=limit)._checked()

    def around(self, bodies: Sequence[bytes], truncate: bool, direction: Direction, param: str) -> Encoded:
        """Cut the ids of texts, put them between the others, and lay them end to end.

        Raises InputError, which names `param`, for a text that is too long while `truncate` is false, or has no tokens
        where none are put around it.
        """
        overhead, truncated = self.overhead, 0
        limit = (self.limit - overhead) * ID_BYTES
        lengths = array("i")
        pieces: list[bytes] = []
        for body in bodies:
            if len(body) > limit:
                if not truncate:
                    raise too_long(len(lengths), len(body) // ID_BYTES + overhead, self.limit, param)
                truncated += 1
                body = body[:limit] if direction == "right" else body[-limit:]
            tokens = len(body) // ID_BYTES + overhead
            pieces += (self.before, body, self.after)
            if tokens < self.filled:
                pieces.append(self.filler * (self.filled - tokens))
                tokens = self.filled
            lengths.append(tokens)
        if not self.overhead and 0 in lengths:
            index = lengths.index(0)
            raise InputError(f"`{param}`: text {index} has no tokens", param=param, kind="tokenizer")
        # A bytearray, because torch wants a writable array.
        ids = np.frombuffer(bytearray().join(pieces), np.int32)
        return Encoded(ids, np.frombuffer(lengths, np.int32) if lengths else np.zeros(0, np.int32), truncated)

    def _checked(self) -> Frame:
        if self.capacity < 1:
            raise BrokenModel(f"special tokens leave no space for text within max_input_length {self.limit}")
        return self


def _ids(token: int) -> bytes:
    return array("i", [token]).tobytes()


def pack_ids(
    sequences: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    limit: int,
    truncate: bool,
    direction: Direction,
    param: str,
) -> Chunks[Encoded]:
    """Pack ids unchanged, in chunks. Sequences of over `limit` ids are cut, or refused while `truncate` is false.

    Raises InputError for an empty sequence, one that is too long, or an id that the model does not have.
    """
    ids, lengths, truncated = array("i"), array("i"), 0
    chunk = CHUNK_IDS
    for index, item in enumerate(sequences):
        sequence = item
        if not len(sequence):
            raise InputError(f"`{param}`: sequence {index} has no token ids", param=param)
        if len(sequence) > limit:
            if not truncate:
                raise too_long(index, len(sequence), limit, param)
            truncated += 1
            sequence = sequence[:limit] if direction == "right" else sequence[-limit:]
        check_ids(index, sequence, vocab_size, param)
        ids.extend(sequence)
        lengths.append(len(sequence))
        if len(ids) >= chunk:
            chunk = len(ids) + CHUNK_IDS
            yield len(ids)
    return Encoded(np.array(ids, np.int32), np.array(lengths, np.int32), truncated)


def check_ids(index: int, sequence: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InputError for an id that the model does not have, or that is no int: an array takes True for 1."""
    if sequence and (not {int} >= {*map(type, sequence)} or min(sequence) < 0 or max(sequence) >= vocab_size):
        wrong = next(i for i in sequence if type(i) is not int or not 0 <= i < vocab_size)
        raise bad_id(index, wrong, vocab_size, param)
