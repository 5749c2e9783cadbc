"""Texts, token ids, or both in one list, of one request: how much work they are, and their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from embert.engine import Encoded, Tokenizer
from embert.server.engine_client.pending import Receive
from embert.server.http.errors import EmptyInput
from embert.server.request.request_body import TextsAndIds
from embert.server.request.text_pairs import interleaved
from embert.server.request.tokenizer_pool import TokenizerPool, input_errors

__all__ = ["GivenTexts", "TextTokenizer"]

# Up to so many are tokenized on the event loop, which costs less than the way to a thread and back.
_INLINE_CHARACTERS = 4096
_INLINE_KNOWN_CHARACTERS = 65536  # where the word cache knows all words: half a millisecond
_INLINE_IDS = 16384
_WORDS_SOUGHT_IN = 262_144  # characters: a few milliseconds on the event loop

# What stands for texts where a list has ids, too, so that errors name the right index.
_NO_IDS = [0]


@dataclass(frozen=True, slots=True)
class GivenTexts:
    """A list of texts, of lists of ids, or of both."""

    items: Sequence[Any]
    kind: type | None  # str, list, or None for both
    characters: int
    ids: int

    @classmethod
    def of(cls, given: TextsAndIds, param: str) -> GivenTexts:
        """From a request's field. Raises EmptyInput when there is nothing to encode."""
        if isinstance(given, str):
            given = [given]
        if not given:
            raise EmptyInput(f"`{param}` must not be an empty list", param)
        if isinstance(given[0], int):
            return cls([given], list, 0, len(given))
        for index, item in enumerate(given):
            if not item:
                name = f"{param}[{index}]" if len(given) > 1 else param
                raise EmptyInput(f"`{name}` must not be empty", param)
        kinds = {*map(type, given)}
        kind = kinds.pop() if len(kinds) == 1 else None
        size = sum(map(len, given))
        ids = 0 if kind is str else sum(len(item) for item in given if isinstance(item, list))
        return cls(given, kind, size - ids, ids)

    @property
    def most_tokens(self) -> int:
        """A cheap upper bound, as long as nothing is cut."""
        return self.characters + self.ids + (0 if self.kind is list else 2 * len(self.items))

    def least_tokens(self, longest: int) -> int:
        """A lower bound for items cut to `longest`: no token spans a space. Reads only the beginning."""
        tokens = 0
        characters = _WORDS_SOUGHT_IN
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
class TextTokenizer:
    """The tokenizer, here or on its threads."""

    tokenizer: Tokenizer
    pool: TokenizerPool
    most_unbroken: int  # characters of a text without a place to divide it

    async def encode(
        self,
        given: GivenTexts,
        receive: Receive,
        check: Callable[[int], None],
        *,
        prompt: str,
        is_query: bool | None,
        **how: Any,
    ) -> Encoded:
        """All of them, in their order. `check` and the errors are those of TokenizerPool.run.

        `prompt` and `is_query` are for texts; `how` are other options of Tokenizer.encode.
        """
        as_texts = {"prompt": prompt, "is_query": is_query, **how}
        with input_errors():
            if given.kind is str:
                return await self._encode(given.items, given.characters, receive, check, as_texts)
            if given.kind is list:
                return await self._pack(given.items, given.ids, receive, check, how)
            are_texts = [isinstance(item, str) for item in given.items]
            texts = [
                item if is_text else self.tokenizer.probe for item, is_text in zip(given.items, are_texts, strict=True)
            ]
            lists = [_NO_IDS if is_text else item for item, is_text in zip(given.items, are_texts, strict=True)]
            encoded = await self._encode(texts, given.characters, receive, check, as_texts)
            return interleaved(are_texts, encoded, await self._pack(lists, given.ids, receive, check, how))

    async def _encode(
        self,
        texts: Sequence[str],
        characters: int,
        receive: Receive,
        check: Callable[[int], None],
        how: dict[str, Any],
    ) -> Encoded:
        if characters <= _INLINE_KNOWN_CHARACTERS:
            known = self.tokenizer.encode_known(texts, **how)
            if known is not None:
                return known
        if characters <= _INLINE_CHARACTERS:
            return self.tokenizer.encode(texts, **how)
        turns = self.tokenizer.encode_chunks(texts, **how, most_unbroken=self.most_unbroken)
        return await self.pool.run(turns, characters, receive, check)

    async def _pack(
        self,
        lists: Sequence[Sequence[int]],
        ids: int,
        receive: Receive,
        check: Callable[[int], None],
        how: dict[str, Any],
    ) -> Encoded:
        if ids <= _INLINE_IDS:
            return self.tokenizer.from_ids(lists, **how)
        return await self.pool.run(self.tokenizer.from_ids_chunks(lists, **how), ids, receive, check)
