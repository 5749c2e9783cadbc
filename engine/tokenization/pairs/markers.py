"""Rows of Laya: a question, its options each behind a marker, and the text that it is about."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

import numpy as np

from embert.engine.errors import InputError
from embert.engine.heads.checkpoints.decider import LAYA_TYPES
from embert.engine.heads.description import MarkerDecider
from embert.engine.tokenization.backend import Backend
from embert.engine.tokenization.encoded import Chunks, Encoded, too_long
from embert.engine.tokenization.pairs.request import PairRequest

# Laya's tokens of an option without its marker, of a question, and of either where options are many.
OPTION_TOKENS, QUESTION_TOKENS = 48, 16
LEAST_OPTION_TOKENS, LEAST_QUESTION_TOKENS = 4, 8


class MarkerPairs:
    """Pairs of a model that decides by markers: a question with its options, and a state."""

    def __init__(self, backend: Backend, decider: MarkerDecider) -> None:
        self._backend, self._decider = backend, decider

    def encode_chunks(self, request: PairRequest) -> Chunks[Encoded]:
        """Rows of Laya: a second text is a question, its options each behind a marker; the first text follows them.

        The token types are the number of the question's type. Raises InputError for options that do not fit.
        """
        decider, options = self._decider, request.options
        cuts = self._backend.cuts(options)
        states = [text.replace(decider.marker_text, " ") for text in request.firsts]
        pieces = [second.split(decider.marker_text) for second in request.seconds]
        cut = dataclasses.replace(options, truncate=True, direction="right")

        def read(texts: Sequence[str]) -> Chunks[list[array[int]]]:
            bodies = yield from self._backend.read(
                texts, cut, request.chunking, capacity=decider.most_tokens, param=options.second_param, refuse=refuse
            )
            return [array("i", body) for body in bodies]

        def refuse(index: int, tokens: int) -> InputError:
            return too_long(index, tokens, decider.most_tokens, options.param)

        questions = iter((yield from read([piece for each in pieces for piece in each])))
        bodies = yield from read(states)
        rows, types, truncated = [], [], 0
        for index, texts in enumerate(pieces):
            row = _mark_row(decider, [next(questions) for _ in texts])
            room = decider.most_tokens - len(row) - 1
            if room < 0:
                raise InputError(
                    f"has {len(texts) - 1} options in {len(row)} tokens; the limit is {decider.most_tokens - 1}",
                    param=options.second_param,
                    subject=f"question {index}",
                )
            state = bodies[0 if len(bodies) == 1 else index]
            if len(state) > room:
                if not cuts:
                    raise too_long(index, len(row) + len(state) + 1, decider.most_tokens, options.param, what="pair")
                truncated += 1
            row += state[:room]
            row.append(decider.separator)
            rows.append(row)
            types.append(LAYA_TYPES.index(texts[0].partition(" ")[0]))
        lengths = np.array([len(row) for row in rows], np.int32)
        ids = np.frombuffer(b"".join(rows), np.int32)
        return Encoded(ids, lengths, truncated, np.repeat(np.array(types, np.int32), lengths))


def _mark_row(decider: MarkerDecider, pieces: Sequence[array[int]]) -> array[int]:
    """The ids of a question and its options, as Laya shortens them, up to the state."""
    head, *texts = pieces
    options = [array("i", [decider.marker]) + text[:OPTION_TOKENS] for text in texts]
    left = decider.question_tokens - sum(map(len, options))
    if left < QUESTION_TOKENS:
        each = max(LEAST_OPTION_TOKENS, (decider.question_tokens - QUESTION_TOKENS) // max(1, len(options)))
        options = [option[:each] for option in options]
        left = decider.question_tokens - sum(map(len, options))
    row = array("i", [decider.first]) + head[: max(LEAST_QUESTION_TOKENS, left)]
    row.append(decider.separator)
    for option in options:
        row += option
    row.append(decider.separator)
    return row
