"""Pairs of texts of one request, and single texts among them: their size, and their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from embert.engine import Encoded, Tokenizer
from embert.engine.batch import cumulative
from embert.engine.tokenization.pairs import NO_PAIR_LIMITS, PairLimits, PairOptions
from embert.engine.tokenization.tokenizer import EncodeOptions
from embert.server.engine_client.pending import Receive
from embert.server.request.tokenizer_pool import TokenizerPool, input_errors

__all__ = ["PairTokenizeOptions", "PairTokenizer", "TextPairs", "interleaved"]

# Up to so many are tokenized on the event loop, as in texts_and_ids.py.
_INLINE_CHARACTERS = 4096
_INLINE_KNOWN_CHARACTERS = 65536  # where the word cache knows all words

_WORDS_SOUGHT_IN = 262_144  # characters: a few milliseconds on the event loop
_SPECIAL_TOKENS = 4  # of a pair, at the most


class PairTokenizeOptions(NamedTuple):
    """How a request wants its pairs read."""

    truncate: bool | None = None  # whether a pair that is too long is cut; None: as --auto-truncate says
    direction: Any = None  # the end of a text that is cut off, "right" or "left"; None: the tokenizer's own
    limits: PairLimits = NO_PAIR_LIMITS


@dataclass(frozen=True, slots=True)
class TextPairs:
    """Pairs of a first and a second text; None for the second: a single text. One first text is for all pairs."""

    firsts: Sequence[str]
    seconds: Sequence[str | None]

    @property
    def size(self) -> int:
        """Characters that the request has."""
        return sum(map(len, self.firsts)) + self._second_characters

    @property
    def characters(self) -> int:
        """Characters of all pairs."""
        shared = len(self.seconds) if len(self.firsts) == 1 else 1
        return shared * sum(map(len, self.firsts)) + self._second_characters

    @property
    def _second_characters(self) -> int:
        return sum(len(second) for second in self.seconds if second is not None)

    @property
    def most_tokens(self) -> int:
        """A cheap upper bound, as long as nothing is cut."""
        return self.characters + _SPECIAL_TOKENS * len(self.seconds)

    def first(self, index: int) -> str:
        """The first text of a pair."""
        return self.firsts[0 if len(self.firsts) == 1 else index]

    def least_tokens(self, longest: int, limits: PairLimits) -> int:
        """A lower bound for pairs cut to `longest` tokens: no token spans a space. Reads only the beginning."""
        longest = min(longest, limits.pair or longest)
        most_first, most_second = (min(limit or longest, longest) for limit in (limits.first, limits.second))
        left, tokens, first_words = _WORDS_SOUGHT_IN, 0, 0
        for index, second in enumerate(self.seconds):
            if left <= 0:
                break
            if index < len(self.firsts):
                first_words = _words(self.firsts[index], left, most_first)
                left -= len(self.firsts[index])
            second_words = 0
            if second is not None:
                second_words = _words(second, max(left, 0), most_second)
                left -= len(second)
            tokens += min(first_words + second_words, longest)
        return tokens

    def of_kind(self, *, single: bool, filler: str) -> TextPairs:
        """The single texts, or the pairs. `filler` stands in the others' places, so errors name the right index."""
        here = [(second is None) == single for second in self.seconds]
        firsts = [self.first(index) if is_here else filler for index, is_here in enumerate(here)]
        seconds = [second or "" if is_here else "" for second, is_here in zip(self.seconds, here, strict=True)]
        return TextPairs(firsts, seconds)


@dataclass(frozen=True, slots=True)
class PairTokenizer:
    """The tokenizer, here or on its threads."""

    tokenizer: Tokenizer
    pool: TokenizerPool
    most_unbroken: int  # characters of a text without a place to divide it

    async def encode(
        self,
        texts: TextPairs,
        receive: Receive,
        check: Callable[[int], None],
        options: PairOptions,
    ) -> Encoded:
        """The pairs and single texts, in their order. `check` and the errors are those of TokenizerPool.run."""
        are_single = [second is None for second in texts.seconds]
        with input_errors():
            if not any(are_single):
                return await self._encode_pairs(texts, receive, check, options)
            singles = await self._encode_firsts(
                texts.of_kind(single=True, filler=self.tokenizer.probe), receive, check, options
            )
            if all(are_single):
                return singles
            pairs = await self._encode_pairs(
                texts.of_kind(single=False, filler=self.tokenizer.probe), receive, check, options
            )
            return interleaved(are_single, singles, pairs)

    async def _encode_pairs(
        self,
        texts: TextPairs,
        receive: Receive,
        check: Callable[[int], None],
        options: PairOptions,
    ) -> Encoded:
        firsts, seconds = texts.firsts, cast("Sequence[str]", texts.seconds)
        if texts.characters <= _INLINE_CHARACTERS:
            return self.tokenizer.encode_pairs(firsts, seconds, **options)
        if texts.characters <= _INLINE_KNOWN_CHARACTERS:
            known = self.tokenizer.encode_known_pairs(firsts, seconds, **options)
            if known is not None:
                return known
        chunks = self.tokenizer.encode_pairs_chunks(firsts, seconds, **options, most_unbroken=self.most_unbroken)
        return await self.pool.run(chunks, texts.size, receive, check)

    async def _encode_firsts(
        self,
        texts: TextPairs,
        receive: Receive,
        check: Callable[[int], None],
        options: PairOptions,
    ) -> Encoded:
        single: EncodeOptions = {
            "truncate": options["truncate"],
            "direction": options["direction"],
            "param": options["params"][0],
        }
        if texts.size <= _INLINE_CHARACTERS:
            return self.tokenizer.encode(texts.firsts, **single)
        chunks = self.tokenizer.encode_chunks(texts.firsts, **single, most_unbroken=self.most_unbroken)
        return await self.pool.run(chunks, texts.size, receive, check)


def _words(text: str, characters: int, most: int) -> int:
    return min(len(text[:characters].split(maxsplit=most)), most)


def interleaved(are_single: Sequence[bool], singles: Encoded, others: Encoded) -> Encoded:
    """At each place the single text of one or the pair, or ids, of the other. Both have something at every place."""
    sources = (others, singles)
    starts = [cumulative(source.lengths) for source in sources]
    spans = [slice(*starts[single][index : index + 2]) for index, single in enumerate(are_single)]
    ids = [sources[single].ids[span] for single, span in zip(are_single, spans, strict=True)]
    types = None
    if others.token_types is not None:
        both = (others.token_types, np.zeros(singles.tokens, np.int32))
        types = np.concatenate([both[single][span] for single, span in zip(are_single, spans, strict=True)])
    lengths = np.where(are_single, singles.lengths, others.lengths)
    return Encoded(np.concatenate(ids), lengths, singles.truncated + others.truncated, types)
