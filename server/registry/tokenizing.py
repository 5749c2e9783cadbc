"""Inputs of a request: texts, token ids, both in one list, or pairs of texts; their sizes and their tokens.

Small inputs are tokenized on the event loop, large ones in chunks on the tokenizer's threads.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np

from embert.engine import Encoded, Tokenizer
from embert.engine.batch import cumulative
from embert.engine.errors import InputError, InputTooLarge
from embert.engine.tokenization.encoded import Chunks, EncodedSpans, TokenizeOptions, finish
from embert.server.engine_client.router import Receive
from embert.server.http.errors import EmptyInput, Invalid, Overloaded, PayloadTooLarge, ServerError
from embert.server.request.request_body import TextsAndIds

# Limits of what is tokenized on the event loop, which costs less than the way to a thread and back.
_INLINE_CHARACTERS = 4096
_INLINE_KNOWN_CHARACTERS = 65536  # where the word cache knows all words: half a millisecond
_INLINE_IDS = 16384
_COUNTED_CHARACTERS = 262_144  # in which words are counted: a few milliseconds on the event loop
_SPECIAL_TOKENS = 4  # of a pair, at most
MAX_WAITING_BODIES = 2  # limit of the characters or ids that wait for the threads, in bodies of --payload-limit
_CHARACTERS_PER_S = 1_000_000  # of one thread, at least
_NO_IDS = [0]  # takes the index of a text in a list of ids, so that errors name the right index

ResultT = TypeVar("ResultT")


def check_texts(texts: Sequence[object], param: str, path: str = "") -> None:
    """Raises EmptyInput for an empty list, and for a list with an empty text or empty ids."""
    if not texts:
        raise EmptyInput("must not be an empty list", param, path=path)
    if not all(texts):
        index = f"[{[*map(bool, texts)].index(False)}]" if len(texts) > 1 else ""
        raise EmptyInput("must not be empty", param, path=path + index)


@dataclass(frozen=True, slots=True)
class InputTexts:
    """A list of texts, of lists of ids, or of both."""

    items: Sequence[Any]
    kind: type | None  # str, list, or None for both
    characters: int
    ids: int

    @classmethod
    def of(cls, inputs: TextsAndIds, param: str) -> InputTexts:
        """Reads the field `param` of a request. Raises EmptyInput if there is nothing to encode."""
        items: Sequence[Any] = [inputs] if isinstance(inputs, str) else inputs
        if items and isinstance(items[0], int):
            return cls([items], list, 0, len(items))
        if not items or not all(items):
            check_texts(items, param)
        kinds = {*map(type, items)}
        kind = kinds.pop() if len(kinds) == 1 else None
        size = sum(map(len, items))
        ids = 0 if kind is str else sum(len(item) for item in items if isinstance(item, list))
        return cls(items, kind, size - ids, ids)

    @property
    def most_tokens(self) -> int:
        """A cheap upper bound if nothing is cut."""
        return self.characters + self.ids + (0 if self.kind is list else 2 * len(self.items))

    def least_tokens(self, longest: int) -> int:
        """A lower bound for items cut to `longest`: no token spans a space. Reads only the beginning."""
        tokens = 0
        characters = _COUNTED_CHARACTERS
        for item in self.items:
            if isinstance(item, str):
                words = len(item[:characters].split(maxsplit=longest))
                characters -= len(item)
                if characters <= 0:
                    return tokens + min(words, longest)
                tokens += min(words, longest)
            else:
                tokens += min(len(item), longest)
        return tokens


@dataclass(frozen=True, slots=True)
class TextPairs:
    """Pairs of texts, or single texts, whose second is None. A single item in `firsts` belongs to every pair."""

    firsts: Sequence[str]
    seconds: Sequence[str | None]
    instruction: str = ""  # put into each pair
    characters: int = field(init=False)  # of all pairs

    def __post_init__(self) -> None:
        repeats = len(self.seconds) if len(self.firsts) == 1 else 1
        firsts = repeats * sum(map(len, self.firsts)) + len(self.instruction) * len(self.seconds)
        seconds = sum([len(second) for second in self.seconds if second is not None])
        object.__setattr__(self, "characters", firsts + seconds)

    @property
    def size(self) -> int:
        """Characters of all texts. A text of several pairs counts once."""
        sizes = {id(text): len(text) for text in (*self.firsts, *self.seconds) if text is not None}
        return sum(sizes.values()) + len(self.instruction)

    def with_prompt(self, prompt: str) -> TextPairs:
        """Returns the pairs with a prompt before each first text. A text of several pairs is copied once."""
        prompted = {text: prompt + text for text in {*self.firsts}}
        return TextPairs([prompted[text] for text in self.firsts], self.seconds, self.instruction)

    @property
    def most_tokens(self) -> int:
        """A cheap upper bound if nothing is cut."""
        return self.characters + _SPECIAL_TOKENS * len(self.seconds)

    def first(self, index: int) -> str:
        return self.firsts[0 if len(self.firsts) == 1 else index]

    def least_tokens(self, longest: int, options: TokenizeOptions, *, shares: bool = False) -> int:
        """A lower bound for pairs cut to `longest` tokens: no token spans a space. Reads only the beginning.

        With `shares` a first text of all pairs counts once.
        """
        longest = min(longest, options.limit or longest)
        most_first, most_second = (
            min(limit or longest, longest) for limit in (options.first_limit, options.second_limit)
        )
        left, tokens, first_words = _COUNTED_CHARACTERS, 0, 0
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
            if shares:
                first_words = 0
        return tokens

    def of_kind(self, *, single: bool, filler: str) -> TextPairs:
        """Returns the single texts, or the pairs. `filler` replaces the others, so that errors name the right index."""
        here = [(second is None) == single for second in self.seconds]
        firsts = [self.first(index) if is_here else filler for index, is_here in enumerate(here)]
        seconds = [second or "" if is_here else "" for second, is_here in zip(self.seconds, here, strict=True)]
        return TextPairs(firsts, seconds)


def _words(text: str, characters: int, most: int) -> int:
    return min(len(text[:characters].split(maxsplit=most)), most)


# --- tokens ---


@dataclass(frozen=True, slots=True)
class InputTokenizer:
    """A model's tokenizer, on the event loop or on threads. `check` and errors of the methods: TokenizerPool.run."""

    tokenizer: Tokenizer
    pool: TokenizerPool

    async def encode(
        self,
        inputs: InputTexts,
        receive: Receive,
        check: Callable[[int], None],
        options: TokenizeOptions,
        prompt: str,
    ) -> Encoded:
        """Tokenizes texts, ids or both, in their order. `prompt` precedes each text."""
        if inputs.kind is str:
            return await self._encode(inputs.items, inputs.characters, receive, check, options, prompt)
        if inputs.kind is list:
            return await self._pack(inputs.items, inputs.ids, receive, check, options)
        are_texts = [isinstance(item, str) for item in inputs.items]
        texts = [
            item if is_text else self.tokenizer.probe for item, is_text in zip(inputs.items, are_texts, strict=True)
        ]
        lists = [_NO_IDS if is_text else item for item, is_text in zip(inputs.items, are_texts, strict=True)]
        encoded = await self._encode(texts, inputs.characters, receive, check, options, prompt)
        return interleave(are_texts, encoded, await self._pack(lists, inputs.ids, receive, check, options))

    async def encode_spans(
        self,
        texts: InputTexts,
        receive: Receive | None,
        check: Callable[[int], None],
        options: TokenizeOptions,
        stride: int | None,
    ) -> EncodedSpans:
        """Tokenizes texts into one or several sequences each, with the characters of each token."""
        chunks = self.tokenizer.encode_spans_chunks(texts.items, options, stride=stride)
        if texts.characters <= _INLINE_CHARACTERS and not stride:  # a stride multiplies the tokens
            return finish(chunks)
        return await self.pool.run(chunks, texts.characters, receive, check)

    async def encode_pairs(
        self, texts: TextPairs, receive: Receive, check: Callable[[int], None], options: TokenizeOptions
    ) -> Encoded:
        """Tokenizes pairs and single texts, in their order."""
        are_single = [second is None for second in texts.seconds]
        if not any(are_single):
            return await self._encode_pairs(texts, receive, check, options)
        firsts = texts.of_kind(single=True, filler=self.tokenizer.probe)
        singles = await self._encode(firsts.firsts, firsts.size, receive, check, options, "")
        if all(are_single):
            return singles
        pairs = texts.of_kind(single=False, filler=self.tokenizer.probe)
        return interleave(are_single, singles, await self._encode_pairs(pairs, receive, check, options))

    async def _encode(
        self,
        texts: Sequence[str],
        characters: int,
        receive: Receive,
        check: Callable[[int], None],
        options: TokenizeOptions,
        prompt: str,
    ) -> Encoded:
        tokenizer = self.tokenizer
        if characters <= _INLINE_KNOWN_CHARACTERS:
            known = tokenizer.encode_known(texts, options, prompt=prompt)
            if known is not None:
                return known
        if characters <= _INLINE_CHARACTERS:
            return tokenizer.encode(texts, options, prompt=prompt)
        return await self.pool.run(tokenizer.encode_chunks(texts, options, prompt=prompt), characters, receive, check)

    async def _encode_pairs(
        self, texts: TextPairs, receive: Receive, check: Callable[[int], None], options: TokenizeOptions
    ) -> Encoded:
        tokenizer, firsts, seconds = self.tokenizer, texts.firsts, cast("Sequence[str]", texts.seconds)
        if texts.characters <= _INLINE_CHARACTERS:
            return tokenizer.encode_pairs(firsts, seconds, options)
        if texts.characters <= _INLINE_KNOWN_CHARACTERS:
            known = tokenizer.encode_known_pairs(firsts, seconds, options)
            if known is not None:
                return known
        chunks = tokenizer.encode_pairs_chunks(firsts, seconds, options)
        return await self.pool.run(chunks, texts.size, receive, check)

    async def _pack(
        self,
        lists: Sequence[Sequence[int]],
        ids: int,
        receive: Receive,
        check: Callable[[int], None],
        options: TokenizeOptions,
    ) -> Encoded:
        if ids <= _INLINE_IDS:
            return self.tokenizer.from_ids(lists, options)
        return await self.pool.run(self.tokenizer.from_ids_chunks(lists, options), ids, receive, check)


def interleave(are_single: Sequence[bool], singles: Encoded, others: Encoded) -> Encoded:
    """Takes each sequence from `singles` or from `others`, which have one for every index."""
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


# --- the tokenizer's threads ---


class TokenizerPool:
    """Threads of one HTTP process that tokenize for all of its models."""

    def __init__(self, threads: int, payload_limit: int) -> None:
        self._threads, self._payload_limit = threads, payload_limit
        self._executor = ThreadPoolExecutor(threads, "tokenize")
        self._waiting = 0  # characters or ids of the requests in `run`

    async def run(
        self,
        chunks: Chunks[ResultT],
        size: int,
        receive: Callable[[], Awaitable[Any]] | None,
        check: Callable[[int], None],
    ) -> ResultT:
        """Tokenizes one request of `size` characters or ids; other requests run between its chunks.

        `check` gets the number of tokens after each chunk, and raises to end the work: over a limit, or out of time.
        Raises Overloaded if too much waits, CancelledError if the client has left, and the errors of `chunks`.
        """
        self._check_waiting(size)
        loop = asyncio.get_running_loop()
        departure: asyncio.Task[None] | None = None
        self._waiting += size
        result: list[ResultT] = []
        try:
            while True:
                tokens = await loop.run_in_executor(self._executor, _next_chunk, chunks, result)
                if result:
                    return result.pop()
                check(tokens)
                if departure is not None and departure.done():
                    raise asyncio.CancelledError
                if departure is None and receive is not None:
                    departure = loop.create_task(_wait_for_disconnect(receive))
        finally:
            self._waiting -= size
            if departure is not None:
                departure.cancel()

    def _check_waiting(self, size: int) -> None:
        limit = MAX_WAITING_BODIES * self._payload_limit
        if self._waiting and self._waiting + size > limit:
            raise Overloaded(
                f"the tokenizer has {self._waiting} characters to do and this request has {size}",
                limit=limit,
                option=f"{MAX_WAITING_BODIES} times --payload-limit",
                retry_after_s=math.ceil(self._waiting / (_CHARACTERS_PER_S * self._threads)),
            )

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _next_chunk(chunks: Chunks[ResultT], result: list[ResultT]) -> int:
    """Returns the number of tokens so far. The last chunk appends its result to `result`.

    An executor's future is in a cycle with its callbacks, so it must not hold the result.
    """
    try:
        return next(chunks)
    except StopIteration as last:
        result.append(last.value)
        return 0


async def _wait_for_disconnect(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def as_server_error(error: ServerError | InputError) -> ServerError:
    """Returns the response to an input that the tokenizer refuses."""
    if isinstance(error, InputTooLarge):
        return PayloadTooLarge(error.reason, error.param, subject=error.subject)
    if isinstance(error, InputError):
        return Invalid(error.reason, error.param, subject=error.subject, kind=error.kind.capitalize())
    return error
