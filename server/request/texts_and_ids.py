"""Texts, token ids, or both in one list, of one request: their size, and their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from embert.engine import Encoded, Tokenizer
from embert.engine.tokenization.tokenizer import EncodeOptions
from embert.server.engine_client.pending import Receive
from embert.server.http.errors import EmptyInput
from embert.server.request.request_body import TextsAndIds
from embert.server.request.text_pairs import interleaved
from embert.server.request.tokenizer_pool import TokenizerPool, input_errors

__all__ = ["InputTexts", "TextTokenizer", "TokenizeOptions"]

# Up to so many are tokenized on the event loop, which costs less than the way to a thread and back.
_INLINE_CHARACTERS = 4096
_INLINE_KNOWN_CHARACTERS = 65536  # where the word cache knows all words: half a millisecond
_INLINE_IDS = 16384
_WORDS_SOUGHT_IN = 262_144  # characters: a few milliseconds on the event loop

# What stands for texts where a list has ids, too, so that errors name the right index.
_NO_IDS = [0]


class TokenizeOptions(NamedTuple):
    """How a request wants its texts or ids read. A named tuple: a frozen dataclass takes longer to make."""

    truncate: bool | None = None  # whether a text that is too long is cut; None: as --auto-truncate says
    direction: Any = None  # the end that is cut off, "right" or "left"; None: the tokenizer's own
    limit: int | None = None  # tokens of a text at most, special ones included; None: what the model takes
    task: str | None = None  # the name of one of the model's adapters
    prompt_name: str | None = None  # the name of one of the model's prompts
    is_query: bool | None = None  # queries or documents, of late interaction or to adapters; None: neither


@dataclass(frozen=True, slots=True)
class InputTexts:
    """A list of texts, of lists of ids, or of both."""

    items: Sequence[Any]
    kind: type | None  # str, list, or None for both
    characters: int
    ids: int

    @classmethod
    def of(cls, inputs: TextsAndIds, param: str) -> InputTexts:
        """From a request's field. Raises EmptyInput when there is nothing to encode."""
        if isinstance(inputs, str):
            inputs = [inputs]
        if not inputs:
            raise EmptyInput(f"`{param}` must not be an empty list", param)
        if isinstance(inputs[0], int):
            return cls([inputs], list, 0, len(inputs))
        for index, item in enumerate(inputs):
            if not item:
                name = f"{param}[{index}]" if len(inputs) > 1 else param
                raise EmptyInput(f"`{name}` must not be empty", param)
        kinds = {*map(type, inputs)}
        kind = kinds.pop() if len(kinds) == 1 else None
        size = sum(map(len, inputs))
        ids = 0 if kind is str else sum(len(item) for item in inputs if isinstance(item, list))
        return cls(inputs, kind, size - ids, ids)

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
        inputs: InputTexts,
        receive: Receive,
        check: Callable[[int], None],
        options: EncodeOptions,
    ) -> Encoded:
        """All of them, in their order. `check` and the errors are those of TokenizerPool.run."""
        with input_errors():
            if inputs.kind is str:
                return await self._encode(inputs.items, inputs.characters, receive, check, options)
            if inputs.kind is list:
                return await self._pack(inputs.items, inputs.ids, receive, check, options)
            are_texts = [isinstance(item, str) for item in inputs.items]
            texts = [
                item if is_text else self.tokenizer.probe for item, is_text in zip(inputs.items, are_texts, strict=True)
            ]
            lists = [_NO_IDS if is_text else item for item, is_text in zip(inputs.items, are_texts, strict=True)]
            encoded = await self._encode(texts, inputs.characters, receive, check, options)
            return interleaved(are_texts, encoded, await self._pack(lists, inputs.ids, receive, check, options))

    async def _encode(
        self,
        texts: Sequence[str],
        characters: int,
        receive: Receive,
        check: Callable[[int], None],
        options: EncodeOptions,
    ) -> Encoded:
        if characters <= _INLINE_KNOWN_CHARACTERS:
            known = self.tokenizer.encode_known(texts, **options)
            if known is not None:
                return known
        if characters <= _INLINE_CHARACTERS:
            return self.tokenizer.encode(texts, **options)
        chunks = self.tokenizer.encode_chunks(texts, **options, most_unbroken=self.most_unbroken)
        return await self.pool.run(chunks, characters, receive, check)

    async def _pack(
        self,
        lists: Sequence[Sequence[int]],
        ids: int,
        receive: Receive,
        check: Callable[[int], None],
        options: EncodeOptions,
    ) -> Encoded:
        of_ids: dict[str, Any] = {name: options.get(name) for name in ("truncate", "direction", "param", "limit")}
        if ids <= _INLINE_IDS:
            return self.tokenizer.from_ids(lists, **of_ids)
        return await self.pool.run(self.tokenizer.from_ids_chunks(lists, **of_ids), ids, receive, check)
