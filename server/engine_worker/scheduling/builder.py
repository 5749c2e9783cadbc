"""Fills a batch from the lanes of one model: small requests first, then deficit round robin.

Every step takes texts, ends a request's quantum or ends the batch, so a batch costs what is in it.
"""

from __future__ import annotations

from bisect import bisect_right

from embert.server.engine_worker.scheduling.queues import BatchLimits, Lane
from embert.server.engine_worker.scheduling.requests import Request, Slice

__all__ = ["BatchBuilder"]

SMALL_PART = 2  # small requests go first in a batch divided by this, while large ones wait


class BatchBuilder:
    """A batch being filled. It takes texts out of their lanes at once."""

    def __init__(self, limits: BatchLimits, tokens: int) -> None:
        """`tokens`: of this batch."""
        self.limits = limits
        self.tokens_left, self.texts_left = tokens, limits.texts
        self.tokens, self.texts = [0, 0], [0, 0]  # of interactive and of low-priority requests
        self._whole: list[Slice] = []  # small requests, or all that one has left
        self._starts: dict[Request, int] = {}  # first text taken, of large requests

    def slices(self) -> list[Slice]:
        """The slices taken so far."""
        return self._whole + [request.piece(first, request.taken) for request, first in self._starts.items()]

    def fill(self, lane: Lane, tokens: int) -> None:
        """Take what fits into so many tokens: small requests in a part of them, large ones, then again small ones."""
        reserved = max(0, self.tokens_left - tokens)
        self.tokens_left -= reserved
        if lane.tokens <= self.tokens_left and lane.texts <= self.texts_left:
            self._take_all(lane)
        else:
            if lane.small:
                self._take_small_first(lane)
            if lane.large:
                self._take_quanta(lane)
            if lane.small:
                self._take_small(lane, self.tokens_left, self.texts_left)
        self.tokens_left += reserved

    def _take_all(self, lane: Lane) -> None:
        self._count(lane, lane.tokens, lane.texts)
        self._whole += lane.small.values()
        for request in lane.large.values():
            self._starts.setdefault(request, request.taken)
            lane.sizes.count(request.waiting_tokens, -1)
            request.taken = request.texts
        lane.small.clear()
        lane.large.clear()

    def _take_small_first(self, lane: Lane) -> None:
        """Take small requests, in half of the batch if large ones wait.

        The text of the large request whose quantum is next has its place, too: else texts as long as half of a batch
        would never run. In the batch after one that had no place for small requests, they go before it.
        """
        tokens, texts, large = self.tokens_left, self.texts_left, lane.next_large()
        if large is not None:
            tokens, texts = tokens // SMALL_PART, texts // SMALL_PART
            if lane.small_first:
                tokens, texts = max(tokens, next(iter(lane.small.values())).tokens), max(texts, 1)
            elif large.next_tokens <= self.tokens_left:
                tokens, texts = min(tokens, self.tokens_left - large.next_tokens), min(texts, self.texts_left - 1)
        lane.small_first = not self._take_small(lane, min(tokens, self.tokens_left), min(texts, self.texts_left))

    def _take_small(self, lane: Lane, tokens: int, texts: int) -> bool:
        """Take small requests, first come, first served, up to so many tokens and texts; whether there was one."""
        taken: list[Slice] = []
        tokens_left, texts_left = tokens, texts
        for piece in lane.small.values():
            if piece.tokens > tokens_left or piece.stop > texts_left:
                break
            tokens_left -= piece.tokens
            texts_left -= piece.stop
            taken.append(piece)
        if len(taken) == len(lane.small):
            lane.small.clear()
        else:
            for piece in taken:
                del lane.small[piece.request.key]
        self._count(lane, tokens - tokens_left, texts - texts_left)
        self._whole += taken
        return bool(taken)

    def _take_quanta(self, lane: Lane) -> None:
        """Take a quantum of each large request, round by round (deficit round robin; Shreedhar and Varghese, 1995).

        A request that the end of the batch interrupts goes on with its quantum in the next batch, before all others.
        What it leaves of a quantum counts in its next round, and so does a text that was longer. A remainder as small
        as a small request runs with the quantum before it.
        """
        limits, large = self.limits, lane.large
        while self.tokens_left and self.texts_left and (request := lane.next_large()) is not None:
            first, before = request.taken, request.waiting_tokens
            tokens = max(request.deficit, request.next_tokens)
            if before <= tokens + limits.small_tokens:
                tokens = before
            left = before - self._take(lane, request, tokens)
            if left == before:
                return  # its next text does not fit
            lane.sizes.count(before, -1)
            if not left:
                del large[request.key]
            else:
                lane.sizes.count(left, 1)
                request.deficit -= before - left
                if request.taken - first >= limits.quantum_texts:
                    request.deficit = min(request.deficit, 0)
                if request.next_tokens <= request.deficit:
                    return  # the batch is full, and the quantum is not used up
                request.has_quantum = False
                large.move_to_end(request.key)

    def _take(self, lane: Lane, request: Request, tokens: int) -> int:
        """Take the request's next texts, what fits into `tokens`, a quantum and the batch; returns their tokens."""
        offsets, first = request.offsets, request.taken
        limit = offsets[first] + min(tokens, self.tokens_left)
        most = first + min(self.limits.quantum_texts, self.texts_left)
        stop = min(bisect_right(offsets, limit, first) - 1, most)
        if stop <= first:
            return 0
        self._starts.setdefault(request, first)
        request.taken = stop
        taken = offsets[stop] - offsets[first]
        self._count(lane, taken, stop - first)
        return taken

    def _count(self, lane: Lane, tokens: int, texts: int) -> None:
        self.tokens[lane.low_priority] += tokens
        self.texts[lane.low_priority] += texts
        self.tokens_left -= tokens
        self.texts_left -= texts
        lane.tokens -= tokens
        lane.texts -= texts
