"""Limits the bytes that an HTTP process holds for its clients; checked before the work.

They are bodies, from their first byte until their request is answered; reservations for answers, from before the work
until they are written; bytes of answers that clients have not read; and pipelined requests that wait for earlier ones.
"""

from __future__ import annotations

from embert.server.http.errors import PayloadTooLarge, Unavailable

__all__ = ["SMALL_BYTES", "HeldBytes"]

SMALL_BYTES = 65_536  # requests up to this may use a quarter more, so that large requests do not block small ones


class HeldBytes:
    """Of one process. Code that adds to `requests` or `unread` also subtracts it."""

    __slots__ = ("limit", "requests", "unread")

    def __init__(self, limit: int) -> None:
        self.limit = limit  # --max-held-bytes
        self.requests = 0  # bodies, and reservations for answers
        self.unread = 0  # in connections' buffers

    @property
    def total(self) -> int:
        """All bytes held."""
        return self.requests + self.unread

    @property
    def scarce(self) -> bool:
        """Whether clients have to read faster: half of the limit waits for them."""
        return 2 * self.unread > self.limit

    @property
    def is_full(self) -> bool:
        """Whether nothing more can be held, however small."""
        return self.total > self._limit_of(0)

    def check(self, size: int, what: str, param: str | None = None, *, counted: int = 0) -> None:
        """Raise Unavailable where `size` bytes cannot be held now, PayloadTooLarge where they never can.

        `counted` of them are held already. `what` they are begins the message, and `param` is the field.
        """
        if size > self.limit:
            raise PayloadTooLarge(
                f"{what} would have about {size} bytes; the limit is {self.limit} (--max-held-bytes)", param
            )
        if self.requests + self.unread + size - counted > self._limit_of(size):
            raise self.refusal(what, size)

    def refusal(self, what: str, size: int) -> Unavailable:
        """The error for a request that would exceed the limit."""
        return Unavailable(
            f"{what} would have {size} bytes, and this HTTP process holds {self.total} for its clients already; "
            f"the limit is {self.limit} (--max-held-bytes)",
            retry_after_s=1,
            reason="memory",
        )

    def _limit_of(self, size: int) -> int:
        return self.limit if size > SMALL_BYTES else self.limit + self.limit // 4
