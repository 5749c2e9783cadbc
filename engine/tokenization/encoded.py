"""Input and output of tokenization: options, packed ids, work in chunks, and the errors of inputs.

Errors name the request field and the text's index.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

import numpy as np
import numpy.typing as npt

from embert.engine.errors import InputError, InputTooLarge

Direction = Literal["right", "left"]  # the end that is cut off


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """Options for turning texts, pairs of texts or token ids into packed ids."""

    truncate: bool | None = None  # whether what is too long is cut, or refused; None: the tokenizer's default
    direction: Direction | None = None  # the end of a text that is cut off; None: the tokenizer's own
    limit: int | None = None  # tokens at most, special ones included; None: the model's limit. Of pairs if they are cut
    first_limit: int | None = None  # tokens of a pair's first text at most, if pairs are cut
    second_limit: int | None = None
    only_first: bool = False  # of a pair that is cut only the first text; the second one must fit
    is_query: bool | None = None  # as queries or as documents of late interaction; None: as any text
    param: str = "inputs"  # the request field that errors name; of pairs that of the first texts
    second_param: str = "texts"  # that of a pair's second texts
    instruction: str | None = None  # of pairs, in place of the model's own


DEFAULT_OPTIONS = TokenizeOptions()
DEFAULT_PAIR_OPTIONS = TokenizeOptions(param="query")


@dataclass(frozen=True, slots=True)
class Chunking:
    """Sizes of chunks of work, in characters."""

    part: int  # of a long text, what is read first: likely to be enough, and small compared with a chunk
    chunk: int
    most_unbroken: int  # without a split point, before a text is refused


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of B texts, or pairs of texts, laid end to end."""

    ids: npt.NDArray[np.int32]  # [T]
    lengths: npt.NDArray[np.int32]  # [B], each 1 … max_input_length
    truncated: int  # how many of the B texts were cut
    token_types: npt.NDArray[np.int32] | None = None  # [T]; None means all 0
    adapter: int = -1  # the index in Adapters.names of the one that they are for; -1: none
    prompt_tokens: int = 0  # [B], number of first tokens that are not pooled

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return len(self.ids)

    @property
    def sequences(self) -> int:
        """B, the number of texts."""
        return len(self.lengths)


def concatenate(parts: Sequence[Encoded]) -> Encoded:
    """Concatenates the sequences of parts without token types."""
    ids, lengths = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "lengths"))
    return Encoded(ids, lengths, sum(part.truncated for part in parts))


@dataclass(frozen=True, slots=True)
class EncodedSpans:
    """Texts as sequences of a model, with the characters of each token. A long text may be several sequences."""

    encoded: Encoded  # of all sequences
    starts: npt.NDArray[np.int32]  # [T]: the token's first character in its text; -1: a special token
    stops: npt.NDArray[np.int32]  # [T]: the one after its last; -1: a special token
    windows: npt.NDArray[np.int32]  # [texts]: sequences of each text


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """Token of a text. `start` and `stop` count characters, and are None for special tokens."""

    id: int
    text: str  # the characters it stands for; a special token's own name
    special: bool
    start: int | None
    stop: int | None


NO_LIMIT = 1 << 62

ResultT = TypeVar("ResultT")
Chunks = Generator[int, None, ResultT]  # yields the number of tokens so far after each chunk, and returns the result


def finish(chunks: Chunks[ResultT]) -> ResultT:
    """Run all chunks and return the result."""
    while True:
        try:
            next(chunks)
        except StopIteration as last:
            result: ResultT = last.value
            return result


def groups(sizes: Iterable[int], most: int) -> Iterator[slice]:
    """Group neighbors whose sizes add up to at most `most`; a larger one gets its own group."""
    first = last = together = 0
    for last, size in enumerate(sizes, 1):
        if together and together + size > most:
            yield slice(first, last - 1)
            first, together = last - 1, 0
        together += size
    if first < last:
        yield slice(first, last)


def check_texts(texts: object, param: str) -> None:
    """Raise InputError if it is not a sequence of strings. A bare string would be read as a text for each character."""
    if type(texts) is list and {str}.issuperset(map(type, texts)):
        return
    check_sequence(texts, param)
    for index, text in enumerate(cast("Sequence[object]", texts)):
        check_text(text, param, f"text {index}")


def check_sequence(values: object, param: str) -> None:
    """Raise InputError if it is not a sequence of texts or other inputs; a string or bytes is one input, not many."""
    if isinstance(values, (str, bytes)):
        raise InputError(f"must be a list, found one {type(values).__name__}; use [text]", param=param)
    if isinstance(values, Mapping) or not (hasattr(values, "__len__") and hasattr(values, "__getitem__")):
        raise InputError(f"must be a list, found {type(values).__name__}", param=param)


def check_text(text: object, param: str, what: str = "") -> None:
    """Raise InputError if it is not a string; `what` names the item of `param`."""
    if not isinstance(text, str):
        raise InputError(f"must be a string, found {type(text).__name__}", param=param, subject=what)


def too_long(index: int, tokens: int, limit: int, param: str, more: str = "", what: str = "text") -> InputError:
    """A text or pair of `tokens` tokens, special ones included, exceeds the `limit`.

    `more` is "more than " where only a lower bound is known. `what` has the `index`: "text" or "pair".
    """
    return InputError(
        f"has {more}{tokens} tokens, the limit is {limit}; shorten it or set truncate to true",
        param=param,
        subject=f"{what} {index}",
    )


def unbroken(index: int, characters: int, limit: int, param: str) -> InputTooLarge:
    """A text without split points that is too long to tokenize at once."""
    return InputTooLarge(
        f"has {characters} characters and no place to divide it for {limit} of them, which is the limit",
        param=param,
        subject=f"text {index}",
    )


def bad_id(index: int, token_id: object, vocab_size: int, param: str) -> InputError:
    """A token id is not one of the model's."""
    # int() of a JSON number may have any number of digits, and repr refuses more than 4300 of them.
    description = repr(token_id) if not isinstance(token_id, int) or abs(token_id) < 10**20 else "out of all bounds"
    return InputError(
        f"has the token id {description}; ids are integers from 0 to {vocab_size - 1}",
        param=param,
        subject=f"sequence {index}",
    )


def untokenizable(index: int, reason: str, param: str) -> InputError:
    """The tokenizer fails on a text."""
    return InputError(f"cannot be tokenized: {reason}", param=param, subject=f"text {index}", kind="tokenizer")


def check_unicode(texts: Sequence[str], param: str) -> None:
    """Raise InputError for the first text with a lone surrogate, for which the library raises a TypeError."""
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(
                "is not valid Unicode: it has a lone surrogate",
                param=param,
                subject=f"text {index}",
                kind="tokenizer",
            ) from None
