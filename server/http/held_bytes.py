"""How many bytes an HTTP process holds for its clients, and the limit of that, which is checked before the work.

They are bodies, from their first byte until their request is answered; room for answers, from before the work until
they are written; what of an answer its client has not read; and what has come and waits for the answers before it.
"""

from __future__ import annotations

from embert.server.http.errors import PayloadTooLarge, Unavailable

__all__ = ["SMALL_BYTES", "HeldBytes"]

SMALL_BYTES = 65_536  # what has no more may take a quarter on top, so that large requests keep no small ones out


class HeldBytes:
    """Of one process. What adds to `requests` or `unread` also subtracts it."""

    __slots__ = ("limit", "requests", "unread")

    def __init__(self, limit: int) -> None:
        self.limit = limit  # --max-held-bytes
        self.requests = 0  # bodies, and room for answers
        self.unread = 0  # in connections' buffers

    @property
    def total(self) -> int:
        """All of them."""
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
        """The answer to a request for which there is no room."""
        return Unavailable(
            f"{what} would have {size} bytes, and this HTTP process holds {self.total} for its clients already; "
            f"the limit is {self.limit} (--max-held-bytes)",
            retry_after_s=1,
            reason="memory",
        )

    def _limit_of(self, size: int) -> int:
        return self.limit if size > SMALL_BYTES else self.limit + self.limit // 4
