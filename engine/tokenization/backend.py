"""The `tokenizers` library configured by a model's tokenizer.json, with a cache of words in front.

Ids are bytes of int32 in native order here: joining bytes is ten times as fast as joining lists of ints.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import string
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding

from embert.engine.errors import BrokenModel, EngineError, InputError, TokenizerFailed
from embert.engine.files.tokenizer_config import TokenizerConfig
from embert.engine.tokenization.encoded import (
    Chunking,
    Chunks,
    Direction,
    TokenInfo,
    TokenizeOptions,
    check_unicode,
    groups,
    untokenizable,
)
from embert.engine.tokenization.library import load_library
from embert.engine.tokenization.split_points import SplitPoints, TextParts, split_points_of
from embert.engine.tokenization.word_cache import word_cache_of

ID_BYTES = 4  # int32
_NOT_THE_LIBRARYS = (TypeError, KeyboardInterrupt, SystemExit)  # the first is about a lone surrogate
TEXT_CHARACTERS = 32  # overhead of a text, in characters
_BYTE_SPACE = "Ġ"  # as GPT-2's table of bytes writes it
# Texts with at most this many characters are tokenized sooner one after the other than by the library's threads, which
# have to wake up. Two cores of an EPYC, medians in µs, one after the other and at once: 2 texts of 75 characters 88 and
# 208, 8 texts of 74 characters 310 and 343, 8 texts of 187 characters 585 and 445.
ALONE_CHARACTERS = 600
PROBED_TOKENS = 1000  # of the vocabulary, where no letter has a token


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The tokens that the post-processor puts before and after a single text."""

    before: list[TokenInfo]
    after: list[TokenInfo]
    prefix: bytes  # ids of `before`
    suffix: bytes  # ids of `after`


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The post-processor's template of a pair: `before`, the first text, `between`, the second text, `after`."""

    before: bytes  # ids
    between: bytes
    after: bytes
    types: npt.NDArray[np.int32] | None  # of each special token, and one of each text, in order; None: all are 0

    @property
    def tokens(self) -> int:
        return (len(self.before) + len(self.between) + len(self.after)) // ID_BYTES

    def token_types(self, first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> npt.NDArray[np.int32] | int:
        """The token types of pairs whose texts have these numbers of tokens, end to end: int32 [T], or 0 for all."""
        if self.types is None:
            return 0
        counts = np.ones((len(first), len(self.types)), np.intp)
        counts[:, len(self.before) // ID_BYTES] = first
        counts[:, (len(self.before) + len(self.between)) // ID_BYTES + 1] = second
        return np.repeat(np.tile(self.types, len(first)), counts.reshape(-1))


class Backend:
    """Texts to ids without special tokens. Safe to use from several threads, which then run at the same time.

    The library's own padding and truncation stay off.
    """

    def __init__(
        self, path: Path, config: TokenizerConfig, *, vocab_size: int, lowercase: bool, truncate: bool = True
    ) -> None:
        """Read a tokenizer.json. Raises BrokenModel if it cannot be read or has a token whose id is over the table.

        `config` is what the files next to it say. Ids are 0 … `vocab_size` - 1. `lowercase` lowercases texts before
        everything else. `truncate` is what options that do not say mean.
        """
        self.path, self.vocab_size, self.truncate = path, vocab_size, truncate
        with _readable(path):
            self._library, description = load_library(path, config, vocab_size=vocab_size, lowercase=lowercase)
            self._read(description)
        truncation = description.get("truncation") or {}
        self.direction: Direction = config.truncation_side or (
            "left" if truncation.get("direction") == "Left" else "right"
        )

    def _read(self, description: dict[str, Any]) -> None:
        vocabulary = description["model"]["vocab"]  # of Unigram a list of tokens with their scores
        if isinstance(vocabulary, list):
            vocabulary = {token: token_id for token_id, (token, _) in enumerate(vocabulary)}
        added = {token.content: token_id for token_id, token in self._library.get_added_tokens_decoder().items()}
        for tokens in (vocabulary, added):
            if max(tokens.values(), default=0) >= self.vocab_size:
                self.check_ids((token_id, token) for token, token_id in tokens.items())
        self.probe = self._probe(vocabulary)
        self.special = self._special_tokens()
        self._words = word_cache_of(description, self.library_ids)
        self.split_points: SplitPoints = split_points_of(description, self._library)
        try:
            self.lead_tokens = len(self.library_ids([self.split_points.lead])[0]) // ID_BYTES
        except TokenizerFailed:
            self.split_points, self.lead_tokens = SplitPoints(), 0

    def check_ids(self, tokens: Iterable[tuple[int, str]]) -> None:
        """Raise BrokenModel for a token, an id and a name, that the model has no embedding for."""
        for token_id, token in tokens:
            if token_id >= self.vocab_size:
                raise BrokenModel(
                    f"{self.path}: the token {token!r} has the id {token_id}; the model has embeddings for ids 0 to "
                    f"{self.vocab_size - 1}"
                )

    def ids(self, texts: Sequence[str], limit: int | None, direction: Direction) -> list[bytes]:
        """Ids of each text. Of a text with more than `limit` tokens, at least its first (last) `limit` ones.

        Raises TypeError for a text with a lone surrogate, TokenizerFailed for one that the library cannot tokenize.
        """
        return self.library_ids(texts) if self._words is None else self._words.ids(texts, limit, direction)

    def cached_ids(self, texts: Sequence[str], limit: int | None, direction: Direction) -> list[bytes] | None:
        """Ids of each text from the cache of words; None if a word is not in it."""
        return None if self._words is None else self._words.known_ids(texts, limit, direction)

    def cuts(self, options: TokenizeOptions) -> bool:
        """True if texts that are too long are truncated."""
        return self.truncate if options.truncate is None else options.truncate

    def read(
        self,
        texts: Sequence[str],
        options: TokenizeOptions,
        chunking: Chunking,
        *,
        capacity: int,
        param: str,
        refuse: Callable[[int, int], InputError],
        first: int = 0,
    ) -> Chunks[list[bytes]]:
        """Ids of each text without special tokens, in chunks.

        Of a text with more than `capacity` tokens, the end that is kept is read until more than `capacity` are known;
        where texts are not cut, `refuse` makes the error from the text's index and the number known; `param` is the
        request field of other errors, and `first` the first text's index in it. Raises InputTooLarge, before the work,
        for a text without a split point within the chunking's limit.
        """
        truncate, direction = self.cuts(options), options.direction or self.direction
        # One past the capacity is enough to cut, but not to say how long a text is.
        limit = capacity + 1 if truncate else None
        sizes = [*map(len, texts)]
        bodies: list[bytes] = []
        tokens = 0
        try:
            if sum(sizes) + len(sizes) * TEXT_CHARACTERS <= chunking.chunk and max(sizes, default=0) <= chunking.part:
                return self._ids(texts, limit, direction, enumerate(texts, first), param)
            for group in groups([min(size, chunking.part) + TEXT_CHARACTERS for size in sizes], chunking.chunk):
                parts = [
                    TextParts(text, self.split_points, direction, chunking.most_unbroken, index=index, param=param)
                    for index, text in enumerate(texts[group], first + group.start)
                ]
                bodies += self._next_bodies(parts, chunking.part, limit, direction)
                tokens += sum(map(len, bodies[group])) // ID_BYTES
                yield tokens
                for index, rest in enumerate(parts, group.start):
                    while rest.more and len(bodies[index]) <= capacity * ID_BYTES:
                        (body,) = self._next_bodies([rest], chunking.chunk, limit, direction)
                        bodies[index] = bodies[index] + body if direction == "right" else body + bodies[index]
                        tokens += len(body) // ID_BYTES
                        yield tokens
                    if rest.more and not truncate:
                        raise refuse(first + index, len(bodies[index]) // ID_BYTES)
        except TypeError:
            check_unicode(texts, param)
            raise
        return bodies

    def _next_bodies(
        self, parts: Sequence[TextParts], size: int, limit: int | None, direction: Direction
    ) -> list[bytes]:
        """Ids of the next part of each text, of `size` characters or somewhat more."""
        chunks = [part.take(size) for part in parts]
        places = ((part.index, text) for part, (_, text) in zip(parts, chunks, strict=True))
        bodies = self._ids([text for _, text in chunks], limit, direction, places, parts[0].param)
        lead = self.lead_tokens * ID_BYTES
        return [body[lead:] if led else body for (led, _), body in zip(chunks, bodies, strict=True)]

    def _ids(
        self,
        texts: Sequence[str],
        limit: int | None,
        direction: Direction,
        places: Iterable[tuple[int, str]],
        param: str,
    ) -> list[bytes]:
        """Ids of each text. Raises InputError for the first text of `places` (index, text) that cannot be tokenized."""
        try:
            return self.ids(texts, limit, direction)
        except TokenizerFailed:
            for index, text in places:
                try:
                    self.library_ids([text])
                except TokenizerFailed as error:
                    raise untokenizable(index, str(error), param) from error
            raise

    def library_ids(self, texts: Sequence[str]) -> list[bytes]:
        """Ids of each text from the library. Raises as `ids`."""
        try:
            # The batch calls release the GIL; `encode` holds it. For several texts they wake up the library's threads.
            alone = len(texts) > 1 and sum(map(len, texts)) <= ALONE_CHARACTERS
            batches = [[text] for text in texts] if alone else [list(texts)]
            encodings = itertools.chain.from_iterable(
                [self._library.encode_batch_fast(batch, add_special_tokens=False) for batch in batches]
            )
        except _NOT_THE_LIBRARYS:
            raise
        except BaseException as error:
            raise TokenizerFailed(_reason(error)) from error
        return [array("i", encoding.ids).tobytes() for encoding in encodings]

    def encodings(self, texts: list[str]) -> list[Encoding]:
        """Each text's ids with their offsets. Raises as `ids`."""
        try:
            return self._library.encode_batch(texts, add_special_tokens=False)
        except _NOT_THE_LIBRARYS:
            raise
        except BaseException as error:
            raise TokenizerFailed(_reason(error)) from error

    def decode(self, sequences: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        return self._library.decode_batch(sequences, skip_special_tokens=skip_special_tokens)

    @property
    def has_subwords(self) -> bool:
        """True if tokens show that they continue a word: WordPiece's ## does."""
        return bool(getattr(self._library.model, "continuing_subword_prefix", None))

    @cached_property
    def keeps_first_space(self) -> bool:
        """True if offsets leave out a token's leading space, but not that of a sequence's first token.

        The library's byte-level processors do so where they count on a space put before each text.
        """
        state = json.loads(self._library.post_processor.__getstate__()) if self._library.post_processor else {}
        steps = state.get("processors", [state])
        return any(
            step.get("type") in ("RobertaProcessing", "ByteLevel") and step["trim_offsets"] and step["add_prefix_space"]
            for step in steps
        )

    def with_first_space(self, token_id: int, start: int, stop: int) -> tuple[int, int]:
        """The characters of a sequence's first token, from those that leave out its leading spaces.

        The library keeps a single space, and leaves out several.
        """
        word = self._library.id_to_token(token_id) or ""
        rest = word.lstrip(_BYTE_SPACE)
        if len(word) - len(rest) != 1:
            return start, stop
        return start - 1, stop if rest else start - 1  # trailing spaces are left out all the same

    def id(self, token: str) -> int | None:
        """A token's id; None for text that is not a token."""
        return self._library.token_to_id(token)

    def join(self, tokens: Sequence[str]) -> str:
        """The text of tokens, as transformers' convert_tokens_to_string has it."""
        decoder = self._library.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))

    def words(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's word of each id, empty for an id without one."""
        return [self._library.id_to_token(token_id) or "" for token_id in ids]

    def pair_template(self, type_vocab_size: int) -> PairTemplate:
        """The template that joins two texts, for a model with `types` token types (1: it has no embeddings for them).

        Raises BrokenModel if the post-processor lacks a second text, or uses a token type that the model lacks.
        """
        problem = "the tokenizer cannot encode pairs of texts: its post-processor"
        pair, (bare,) = self._library.encode(self.probe, self.probe), self.library_ids([self.probe])
        ids, kinds, texts, length = array("i", pair.ids), pair.type_ids, pair.sequence_ids, len(bare) // ID_BYTES
        if 0 not in texts or 1 not in texts:
            raise BrokenModel(f"{problem} leaves one of them out")
        first, second = texts.index(0), texts.index(1)
        between, after = first + length, second + length
        if second < between:
            raise BrokenModel(f"{problem} swaps them")
        special = [*range(first), *range(between, second), *range(after, len(ids))]
        around = all(pair.special_tokens_mask[place] for place in special)
        if not around or not bare == ids[first:between].tobytes() == ids[second:after].tobytes():
            raise BrokenModel(f"{problem} puts special tokens inside a text, not around it")
        types = None
        if type_vocab_size > 1 and any(kinds):
            if max(kinds) >= type_vocab_size:
                raise BrokenModel(f"{problem} gives token type {max(kinds)}, the model has {type_vocab_size} types")
            types = np.array(kinds[: first + 1] + kinds[between : second + 1] + kinds[after:], np.int32)
        return PairTemplate(ids[:first].tobytes(), ids[between:second].tobytes(), ids[after:].tobytes(), types)

    def _probe(self, vocabulary: Iterable[str]) -> str:
        """A text that has a token, to distinguish it from the tokens that the post-processor adds."""
        for text in itertools.chain(string.ascii_letters + string.digits, itertools.islice(vocabulary, PROBED_TOKENS)):
            with contextlib.suppress(TokenizerFailed):
                if text and self.library_ids([text])[0]:
                    return text
        raise BrokenModel(f"{self.path}: the tokenizer makes no token of any letter, nor of its first tokens")

    def _special_tokens(self) -> SpecialTokens:
        bare, full = (self._library.encode(self.probe, add_special_tokens=special) for special in (False, True))
        pair = self._library.encode(self.probe, self.probe)
        for encoding in (full, pair):
            self.check_ids(zip(encoding.ids, encoding.tokens, strict=True))
        if 0 not in full.special_tokens_mask:
            raise BrokenModel("the tokenizer's post-processor leaves the text out")
        self.single_type = max(full.type_ids)
        before = full.special_tokens_mask.index(0)
        after = before + len(bare)
        if full.ids[before:after] != bare.ids:
            raise BrokenModel("the tokenizer puts special tokens inside a text, not around it")
        tokens = [
            TokenInfo(token_id, token, True, None, None) for token_id, token in zip(full.ids, full.tokens, strict=True)
        ]
        return SpecialTokens(
            before=tokens[:before],
            after=tokens[after:],
            prefix=array("i", full.ids[:before]).tobytes(),
            suffix=array("i", full.ids[after:]).tobytes(),
        )


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert any exception of the library to BrokenModel."""
    try:
        yield
    except (EngineError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception, and its panics are not an Exception at all
        raise BrokenModel(f"{path} is not a tokenizer that can be read: {error}") from error


def _reason(error: BaseException) -> str:
    """The library's exceptions name a missing token; a panic, which is not an Exception, may quote the text."""
    return str(error) if isinstance(error, Exception) else "the tokenizer panicked"
