"""Fills a batch from the lanes of one model, and shares what cannot hold everything between their requests."""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice

from embert.server.worker.scheduling.queues import Lane
from embert.server.worker.scheduling.requests import Request, Slice

__all__ = ["EXACT_REQUESTS", "BatchBuilder", "front", "share"]

EXACT_REQUESTS = 128  # of a lane; up to so many, shares are equal to the token
SKIPPED_TEXTS = 16  # texts too long for the rest of a batch, after which the search for shorter ones ends


class BatchBuilder:
    """A batch being filled."""

    def __init__(self, token_budget: int, text_budget: int) -> None:
        self.tokens_left = token_budget
        self.texts_left = text_budget
        self.tokens, self.texts = [0, 0], [0, 0]  # of interactive and of bulk requests
        self._starts: tuple[dict[Request, int], ...] = {}, {}  # first text taken, of requests that may get more
        self._slices: tuple[list[Slice], ...] = [], []  # of the others

    def slices(self, lane: Lane) -> list[Slice]:
        """The slices taken from a lane."""
        starts = self._starts[lane.bulk]
        return self._slices[lane.bulk] + [request.piece(first, request.taken) for request, first in starts.items()]

    def take(self, request: Request, tokens: int, texts: int) -> int:
        """Take the request's next texts, as many as fit into `tokens`, `texts` and the batch; returns their tokens."""
        offsets, first = request.offsets, request.taken
        limit = offsets[first] + min(tokens, self.tokens_left)
        stop = min(bisect_right(offsets, limit, first) - 1, first + texts, first + self.texts_left)
        if stop <= first:
            return 0
        bulk = request.bulk
        self._starts[bulk].setdefault(request, first)
        request.taken = stop
        taken = offsets[stop] - offsets[first]
        self.tokens[bulk] += taken
        self.texts[bulk] += stop - first
        self.tokens_left -= taken
        self.texts_left -= stop - first
        return taken

    def take_all(self, lane: Lane) -> None:
        """Take everything in a lane; it must fit."""
        slices = self._slices[lane.bulk]
        for piece in lane.requests.values():
            request = piece.request
            texts = len(request.offsets) - 1
            slices.append(piece if piece.stop == texts else request.piece(piece.start, texts))
        self.tokens[lane.bulk] = lane.tokens
        self.texts[lane.bulk] = lane.texts

    def take_one_each(self, lane: Lane) -> bool:
        """Take one text of each request, from the front of the lane on. True if all of them fitted."""
        tokens_left, texts_left, skips_left = self.tokens_left, self.texts_left, SKIPPED_TEXTS
        starts = self._starts[lane.bulk]
        taken: list[Slice] = []
        # In a batch that serves bulk first, the front request of the bulk lane has had its text.
        for piece in islice(lane.requests.values(), int(front(lane) in starts), None):
            if piece.tokens > tokens_left:
                skips_left -= 1
                if not skips_left:
                    break
                continue
            taken.append(piece)
            tokens_left -= piece.tokens
            texts_left -= 1
            if not tokens_left or not texts_left:
                break
        self.tokens[lane.bulk] += self.tokens_left - tokens_left
        self.texts[lane.bulk] += len(taken)
        self.tokens_left, self.texts_left = tokens_left, texts_left
        if skips_left < SKIPPED_TEXTS or not tokens_left or not texts_left:
            self._slices[lane.bulk].extend(taken)
            return False
        for piece in taken:
            starts[piece.request] = piece.start
            piece.request.taken = piece.stop
        return True


def front(lane: Lane) -> Request:
    """The least recently served request of a lane."""
    return next(iter(lane.requests.values())).request


def share(builder: BatchBuilder, lane: Lane) -> None:
    """Share the rest of a batch, which cannot hold everything, between the requests of a lane."""
    if not lane.requests or not builder.tokens_left or not builder.texts_left:
        return
    if len(lane.requests) <= EXACT_REQUESTS:
        builder.take(front(lane), builder.tokens_left, texts=1)  # least recently served: so it never starves
    elif not builder.take_one_each(lane):
        return
    # Give equal shares until no text fits into one: a request that needs less leaves the rest to the others.
    unsatisfied = [piece.request for piece in lane.requests.values() if piece.request.waiting_texts]
    while unsatisfied and builder.tokens_left and builder.texts_left:
        tokens = builder.tokens_left // len(unsatisfied)
        texts = max(1, builder.texts_left // len(unsatisfied))
        if not sum([builder.take(request, tokens, texts) for request in unsatisfied]):
            break
        unsatisfied = [request for request in unsatisfied if request.waiting_texts]
    # The rest goes text by text to the requests furthest behind. It must not go to those that had least: those are the
    # newest, and of 128 equal requests at a time the slowest 1 % would take six times as long as the mean.
    unsatisfied = sorted(
        (request for request in unsatisfied if request.waiting_texts), key=lambda request: request.level
    )
    while unsatisfied and builder.tokens_left and builder.texts_left:
        unsatisfied = [
            request
            for request in unsatisfied
            if builder.take(request, builder.tokens_left, texts=1) and request.waiting_texts
        ]
