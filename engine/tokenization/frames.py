"""What stands around the ids of a text, and how many tokens there may be: of any text, of queries, of documents."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embert.engine.errors import BrokenModel
from embert.engine.heads.description import Role
from embert.engine.tokenization.backend import ID_BYTES, Backend
from embert.engine.tokenization.encoded import Direction, Encoded
from embert.engine.tokenization.input_errors import too_long

__all__ = ["Frame"]


@dataclass(frozen=True, slots=True)
class Frame:
    """Ids are bytes, as in the backend."""

    before: bytes
    after: bytes
    limit: int  # tokens at most, all included
    filler: bytes = b""  # one id, put at the end of a shorter sequence …
    filled: int = 0  # … until it has so many tokens

    @classmethod
    def of(cls, backend: Backend, limit: int, role: Role | None = None) -> Frame:
        """The frame of texts in a role. Raises BrokenModel where it leaves no room for a text."""
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
    def room(self) -> int:
        """Tokens of the text itself that fit."""
        return self.limit - self.overhead

    def around(self, bodies: Sequence[bytes], truncate: bool, direction: Direction, param: str) -> Encoded:
        """Cut the ids of texts, put them between the others, and lay them end to end.

        Raises InputError, which names `param`, for a text that is too long while `truncate` is false.
        """
        limit, truncated = self.room * ID_BYTES, 0
        lengths = array("i")
        pieces: list[bytes] = []
        for body in bodies:
            if len(body) > limit:
                if not truncate:
                    raise too_long(len(lengths), len(body) // ID_BYTES + self.overhead, self.limit, param)
                truncated += 1
                body = body[:limit] if direction == "right" else body[-limit:]
            tokens = len(body) // ID_BYTES + self.overhead
            pieces += (self.before, body, self.after)
            if tokens < self.filled:
                pieces.append(self.filler * (self.filled - tokens))
                tokens = self.filled
            lengths.append(tokens)
        # A bytearray, because torch wants a writable array.
        ids = np.frombuffer(bytearray().join(pieces), np.int32)
        return Encoded(ids, np.frombuffer(lengths, np.int32) if lengths else np.zeros(0, np.int32), truncated)

    def _checked(self) -> Frame:
        if self.room < 1:
            raise BrokenModel(f"no room for text within max_input_length {self.limit}")
        return self


def _ids(token: int) -> bytes:
    return array("i", [token]).tobytes()
