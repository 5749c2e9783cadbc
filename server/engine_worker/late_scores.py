"""MaxSim of one request's documents with its queries, where their vectors are: only scores leave the engine process."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from embert.engine import TaskOutput
from embert.engine.heads.description import MultiVector
from embert.engine.heads.late_interaction import max_sim, multi_vector_mask, pooled
from embert.server.engine_worker.lanes import Slice
from embert.server.ipc.channel import EncodeRequest

Floats = npt.NDArray[np.float32]


class LateScores:
    """Scores of one request. A document is scored with the last query before it.

    The slices of a request may come in any order: the response to a batch with interactive requests goes before that to
    an older one, and a failed batch runs again in halves. A document whose query is not there yet waits for it.
    """

    def __init__(self, message: EncodeRequest, head: MultiVector) -> None:
        self._ids, self._head = np.frombuffer(message.ids, np.int32), head
        self._is_query = np.frombuffer(message.queries, np.bool_)
        self._query_of = np.maximum.accumulate(np.where(self._is_query, np.arange(len(self._is_query)), 0))
        self._queries: dict[int, Floats] = {}  # vectors by the number of the text
        self._waiting: list[tuple[Slice, list[Floats]]] = []  # slices with the vectors of their texts

    def add(self, piece: Slice, rows: TaskOutput) -> list[tuple[Slice, Floats]]:
        """Take the rows of a slice's tokens. Returns the slices that are complete, with a score a text: [texts, 1].

        The score of a query is 0.
        """
        start, stop = piece.start, piece.stop
        bounds = np.array(piece.request.offsets[start : stop + 1])
        ids, bounds = self._ids[bounds[0] : bounds[-1]], bounds - bounds[0]
        masks = {
            is_query: multi_vector_mask(ids, bounds, self._head, is_query=is_query)
            for is_query in {*self._is_query[start:stop].tolist()}
        }
        values = list[Floats]()
        for text, (first, last) in enumerate(itertools.pairwise(bounds.tolist()), start):
            is_query = bool(self._is_query[text])
            vectors = rows.values[first:last][masks[is_query][first:last]]
            values.append(pooled(vectors, self._head.role(is_query)))
            if is_query:
                self._queries[text] = values[-1]
        self._waiting.append((piece, values))
        complete = [entry for entry in self._waiting if self._query_of[entry[0].start] in self._queries]
        self._waiting = [entry for entry in self._waiting if self._query_of[entry[0].start] not in self._queries]
        scored = [(done, self._scores(done, vectors)) for done, vectors in complete]
        for done, _ in complete:  # the next slice may begin with documents of this slice's last query: keep only that
            for text in range(done.start, int(self._query_of[done.stop - 1])):
                self._queries.pop(text, None)
        return scored

    def _scores(self, piece: Slice, values: list[Floats]) -> Floats:
        scores = np.zeros((len(values), 1), np.float32)
        for index, (text, vectors) in enumerate(zip(range(piece.start, piece.stop), values, strict=True)):
            if not self._is_query[text]:
                scores[index] = max_sim(self._queries[int(self._query_of[text])], vectors, self._head)
        return scores
