"""The tokenizer of one model: texts, pairs or ids to packed ids, texts to tokens with offsets, and ids back to texts.

Each kind of work can be done in chunks. A long text is divided only at points that provably do not change its tokens
(split_points.py), and it is read only up to the model's limit. A text's body is its ids without special tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from embert.engine.errors import BrokenModel, InputError, UnsupportedModel
from embert.engine.heads.description import Classifier, LabelDecider, Role
from embert.engine.model import Model
from embert.engine.tokenization.backend import ID_BYTES, Backend
from embert.engine.tokenization.encoded import (
    DEFAULT_OPTIONS,
    DEFAULT_PAIR_OPTIONS,
    NO_LIMIT,
    Chunking,
    Chunks,
    Direction,
    Encoded,
    EncodedSpans,
    TokenInfo,
    TokenizeOptions,
    bad_id,
    check_sequence,
    check_texts,
    finish,
    groups,
    too_long,
)
from embert.engine.tokenization.offsets import Window, encode_spans, tokens_with_offsets
from embert.engine.tokenization.pairs import Pairs

# A chunk is a few milliseconds of one thread.
CHUNK_CHARACTERS = 16_384
UNDIVIDED_CHARACTERS = 1 << 24  # where no other work waits between chunks: enough for all cores at once
# The first part of a long text: likely to be enough, and small compared with a chunk.
LEAST_PART_CHARACTERS, CHARACTERS_PER_TOKEN = 2048, 8
UNBROKEN_CHARACTERS = 131_072  # the usual `most_unbroken`
PROMPTS = 64  # whose numbers of tokens are kept


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads, which then run at the same time.

    Texts are cut here, on ids, and not by the library, so one object serves requests that cut differently.
    """

    def __init__(self, model: Model, *, truncate: bool = True, most_unbroken: int = NO_LIMIT) -> None:
        """Read the model's tokenizer.json. Raises BrokenModel.

        `truncate` is what options that do not say mean. `most_unbroken` characters of a text may lack a split point
        where it is tokenized in chunks.
        """
        path = model.transformer_folder / "tokenizer.json"
        self.vocab_size = model.config.vocab_size  # ids that may be given: 0 … vocab_size - 1
        self.max_input_length = model.max_input_length  # tokens, special tokens included
        self._backend = Backend(
            path, model.tokenizer, vocab_size=self.vocab_size, lowercase=model.lowercase, truncate=truncate
        )
        head = model.heads.multi_vector
        if head is not None and head.query.expansion is not None:
            self._backend.check_ids([(head.query.expansion.token, "the expansion")])
            if head.unattended is not None and self._backend.special.suffix.endswith(_ids(head.unattended)):
                raise UnsupportedModel(
                    f"{path}: queries are expanded with the token that ends them; supported: attend true of "
                    "query_expansion, or attend_to_expansion_tokens true"
                )
        try:
            self._frames = {
                is_query: Frame.of(
                    self._backend,
                    self.max_input_length,
                    None if head is None or is_query is None else head.role(is_query),
                )
                for is_query in (None, True, False)
            }
        except BrokenModel as error:
            raise BrokenModel(f"{path}: {error}") from None
        if self._backend.single_type and model.tokenizer.has_token_types and model.config.type_vocab_size > 1:
            raise BrokenModel(
                f"{path}: the post-processor gives token type {self._backend.single_type} to single texts; supported: 0"
            )
        self._pairs = Pairs(self._backend, model)
        tokens = (*model.tokenizer.special.values(), *model.tokenizer.extra)
        self._named_ids = {self._backend.id(token.content) for token in tokens}  # as transformers' all_special_ids
        unknown = model.tokenizer.special.get("unk_token")
        self.unknown_id = None if unknown is None else self._backend.id(unknown.content)
        self.has_subwords = self._backend.has_subwords  # whether a token says that it continues a word
        self._only_pairs = model.pair_text is not None or model.heads.decider is not None
        decider = model.heads.decider
        if isinstance(decider, LabelDecider) and model.pair_text is not None:
            self._check_labels(path, decider.classifier, model.pair_text.after)
        self._include_prompt = model.include_prompt
        self._prompt_tokens = functools.lru_cache(PROMPTS)(self._count_prompt_tokens)
        capacity = self._frames[None].capacity
        part = max(LEAST_PART_CHARACTERS, min(CHUNK_CHARACTERS, CHARACTERS_PER_TOKEN * capacity))
        self.chunking = Chunking(part, CHUNK_CHARACTERS, most_unbroken)
        self._undivided = Chunking(part, UNDIVIDED_CHARACTERS, most_unbroken)

    def _check_labels(self, path: Path, classifier: Classifier, end: str) -> None:
        """Raise UnsupportedModel for a label that is not the only token behind the chat template."""
        (row,) = classifier.layers
        before, *found = self._backend.library_ids([end, *(end + label for label in classifier.labels)])
        for label, token, body in zip(classifier.labels, row.rows, found, strict=True):
            if body != before + _ids(token):
                raise UnsupportedModel(f"{path}: the label {label} is not one token at the beginning of a reply")

    @property
    def probe(self) -> str:
        """A text that has a token in any tokenizer."""
        return self._backend.probe

    def least_limit(self, is_query: bool | None = None) -> int:
        """The least `limit` for a text: the special tokens and one more."""
        return self._frames[is_query].overhead + 1

    def encode(self, texts: Sequence[str], options: TokenizeOptions = DEFAULT_OPTIONS, *, prompt: str = "") -> Encoded:
        """Tokenize, with the special tokens of a single text. `prompt` is put before every text.

        Raises InputError for `texts` that are not a list of strings, and for a text that is too long and not to be cut,
        has no split point for more than `most_unbroken` characters, or is not valid Unicode.
        """
        check_texts(texts, options.param)
        return finish(self._encode_chunks(texts, options, prompt, self._undivided))

    def encode_chunks(
        self, texts: Sequence[str], options: TokenizeOptions = DEFAULT_OPTIONS, *, prompt: str = ""
    ) -> Chunks[Encoded]:
        """Encode in chunks.

        Raises InputTooLarge, before the work, for a text that is too long without a split point.
        """
        return self._encode_chunks(texts, options, prompt, self.chunking)

    def _encode_chunks(
        self, texts: Sequence[str], options: TokenizeOptions, prompt: str, chunking: Chunking
    ) -> Chunks[Encoded]:
        if self._only_pairs:
            raise InputError("takes pairs of a query and a document", param=options.param, subject="this model")
        if prompt:
            texts = [prompt + text for text in texts]
        frame, param = self._frames[options.is_query].within(options.limit), options.param
        bodies = yield from self._backend.read(
            texts,
            options,
            chunking,
            capacity=frame.capacity,
            param=param,
            refuse=lambda index, tokens: too_long(index, tokens + frame.overhead - 1, frame.limit, param, "more than "),
        )
        return self._encode_frame(frame, bodies, options, prompt)

    def encode_known(
        self, texts: Sequence[str], options: TokenizeOptions = DEFAULT_OPTIONS, *, prompt: str = ""
    ) -> Encoded | None:
        """Encode texts of known words; None if a word is new. Takes a tenth of the time, so it needs no thread."""
        if prompt:
            texts = [prompt + text for text in texts]
        backend = self._backend
        frame = self._frames[options.is_query].within(options.limit)
        limit = frame.capacity + 1 if backend.cuts(options) else None
        bodies = backend.cached_ids(texts, limit, options.direction or backend.direction)
        return None if bodies is None else self._encode_frame(frame, bodies, options, prompt)

    def _encode_frame(self, frame: Frame, bodies: Sequence[bytes], options: TokenizeOptions, prompt: str) -> Encoded:
        """The bodies between special ids, with the number of prompt tokens if the model does not pool prompts."""
        direction = options.direction or self._backend.direction
        encoded = frame.around(bodies, self._backend.cuts(options), direction, options.param)
        if not prompt or self._include_prompt:
            return encoded
        return dataclasses.replace(encoded, prompt_tokens=self._prompt_tokens(prompt, options.limit))

    def _count_prompt_tokens(self, prompt: str, limit: int | None) -> int:
        """The tokens of a prompt by itself, without a special token at its end: as sentence-transformers counts them.

        A text's own first letters may join the prompt's last token; the number stays the same.
        """
        encoded = self.encode([prompt], TokenizeOptions(truncate=True, limit=limit))
        return len(encoded.ids) - (int(encoded.ids[-1]) in self._named_ids)

    def encode_pairs(
        self, firsts: Sequence[str], seconds: Sequence[str], options: TokenizeOptions = DEFAULT_PAIR_OPTIONS
    ) -> Encoded:
        """Tokenize pairs, with the special tokens and token types of pairs. One first text is for all the second ones.

        Of a pair that is too long, the longer text is cut first, as by HuggingFace's `longest_first`. Raises InputError
        for what is not a string or list of strings, a pair that is too long and not to be cut, a text that is not valid
        Unicode, more first than second texts or fewer, and a tokenizer that has no pairs.
        """
        check_texts(firsts, options.param)
        check_texts(seconds, options.second_param)
        return finish(self._pairs.encode_chunks(firsts, seconds, options, self._undivided))

    def encode_pairs_chunks(
        self, firsts: Sequence[str], seconds: Sequence[str], options: TokenizeOptions = DEFAULT_PAIR_OPTIONS
    ) -> Chunks[Encoded]:
        """Encode pairs in chunks, with the InputTooLarge of `encode_chunks`.

        A first text of many pairs makes many tokens of few characters. Their number is yielded before they are made.
        """
        return self._pairs.encode_chunks(firsts, seconds, options, self.chunking)

    def encode_known_pairs(
        self, firsts: Sequence[str], seconds: Sequence[str], options: TokenizeOptions = DEFAULT_PAIR_OPTIONS
    ) -> Encoded | None:
        """Encode pairs of known words; None if a word is new."""
        return self._pairs.encode_known(firsts, seconds, options, self.chunking)

    def from_ids(self, sequences: Sequence[Sequence[int]], options: TokenizeOptions = DEFAULT_OPTIONS) -> Encoded:
        """Take token ids unchanged: nothing is added.

        Raises InputError for an empty sequence, one that is too long and not to be cut, or ids that the model does not
        have.
        """
        _check_sequences(sequences, options.param)
        return finish(self.from_ids_chunks(sequences, options))

    def from_ids_chunks(
        self, sequences: Sequence[Sequence[int]], options: TokenizeOptions = DEFAULT_OPTIONS
    ) -> Chunks[Encoded]:
        """Take token ids in chunks."""
        limit = min(self.max_input_length, options.limit or self.max_input_length)
        direction = options.direction or self._backend.direction
        ids, lengths, truncated = array("i"), array("i"), 0
        chunk = CHUNK_IDS
        for index, item in enumerate(sequences):
            sequence = item
            if not len(sequence):
                raise InputError("has no token ids", param=options.param, subject=f"sequence {index}")
            if len(sequence) > limit:
                if not self._backend.cuts(options):
                    raise too_long(index, len(sequence), limit, options.param)
                truncated += 1
                sequence = sequence[:limit] if direction == "right" else sequence[-limit:]
            check_ids(index, sequence, self.vocab_size, options.param)
            ids.extend(sequence)
            lengths.append(len(sequence))
            if len(ids) >= chunk:
                chunk = len(ids) + CHUNK_IDS
                yield len(ids)
        return Encoded(np.array(ids, np.int32), np.array(lengths, np.int32), truncated)

    def tokenize(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, prompt: str = "", param: str = "inputs"
    ) -> list[list[TokenInfo]]:
        """Tokens with their offsets, which count from the first character of the prompt. Nothing is cut."""
        check_texts(texts, param)
        infos: list[list[TokenInfo]] = [[] for _ in texts]
        for chunk in self.tokenize_chunks(texts, add_special_tokens=add_special_tokens, prompt=prompt, param=param):
            for index, tokens in chunk:
                infos[index] += tokens
        return infos

    def tokenize_chunks(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, prompt: str = "", param: str = "inputs"
    ) -> Iterator[list[tuple[int, list[TokenInfo]]]]:
        """Tokenize in chunks: each yields the next tokens of some texts, with the text's index.

        Raises InputTooLarge, before the work, for a text that is too long without a split point.
        """
        return tokens_with_offsets(
            self._backend,
            texts,
            prompt,
            add_special_tokens=add_special_tokens,
            param=param,
            most_unbroken=self.chunking.most_unbroken,
        )

    def encode_spans(
        self, texts: Sequence[str], options: TokenizeOptions = DEFAULT_OPTIONS, *, stride: int | None = None
    ) -> EncodedSpans:
        """Encode with the characters of each token.

        With a `stride` nothing is cut: a long text is several sequences, each of which shares that many tokens with the
        next. Raises InputError as `encode` does, and for a stride that is not below the tokens of a sequence.
        """
        check_texts(texts, options.param)
        return finish(self.encode_spans_chunks(texts, options, stride=stride))

    def encode_spans_chunks(
        self, texts: Sequence[str], options: TokenizeOptions = DEFAULT_OPTIONS, *, stride: int | None = None
    ) -> Chunks[EncodedSpans]:
        """Encode spans in chunks, with the InputTooLarge of `encode_chunks`."""
        frame = self._frames[None].within(options.limit)
        if stride is not None and not 0 <= stride < frame.capacity:
            raise InputError(
                f"must be from 0 to {frame.capacity - 1}, below the {frame.capacity} tokens of a text that "
                f"this model reads at once; found {stride}",
                param="stride",
            )
        cuts, direction = self._backend.cuts(options), options.direction or self._backend.direction
        return encode_spans(
            self._backend,
            texts,
            Window(frame.capacity, stride, cuts, direction),
            param=options.param,
            most_unbroken=self.chunking.most_unbroken,
        )

    def join(self, tokens: Sequence[str]) -> str:
        """The text of words of the vocabulary."""
        return self._backend.join(tokens)

    def words(self, ids: Sequence[int]) -> list[str]:
        """The words of the vocabulary that these ids stand for."""
        return self._backend.words(ids)

    def decode(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = True, param: str = "ids"
    ) -> list[str]:
        """Token ids back to texts. Raises InputError for ids that the model does not have."""
        _check_sequences(sequences, param)
        return finish(self.decode_chunks(sequences, skip_special_tokens=skip_special_tokens, param=param))

    def decode_chunks(
        self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = True, param: str = "ids"
    ) -> Chunks[list[str]]:
        """Decode in chunks of whole sequences."""
        texts: list[str] = []
        tokens = 0
        for group in groups([*map(len, sequences)], CHUNK_IDS):
            for index in range(group.start, group.stop):
                check_ids(index, sequences[index], self.vocab_size, param)
            ids = [list(sequence) for sequence in sequences[group]]
            texts += self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            tokens += sum(map(len, ids))
            yield tokens
        return texts


def _check_sequences(sequences: object, param: str) -> None:
    """Raise InputError if it is not a list of lists of token ids."""
    check_sequence(sequences, param)
    for index, sequence in enumerate(cast("Sequence[object]", sequences)):
        if isinstance(sequence, (str, bytes)) or not hasattr(sequence, "__len__"):
            raise InputError(
                f"must be a list of token ids, found {type(sequence).__name__}",
                param=param,
                subject=f"sequence {index}",
            )


CHUNK_IDS = 16_384  # ids of a chunk


@dataclass(frozen=True, slots=True)
class Frame:
    """The special ids around a text, a query or a document, and the limit of tokens.

    Ids are bytes, as in the backend.
    """

    before: bytes
    after: bytes
    limit: int  # tokens at most, all included
    filler: bytes = b""  # one id, put at the end of a shorter sequence …
    filled: int = 0  # … until it has this number of tokens
    overhead: int = field(init=False)  # tokens before and after a text
    capacity: int = field(init=False)  # tokens of the text itself that fit

    def __post_init__(self) -> None:
        overhead = (len(self.before) + len(self.after)) // ID_BYTES
        object.__setattr__(self, "overhead", overhead)
        object.__setattr__(self, "capacity", self.limit - overhead)

    @classmethod
    def of(cls, backend: Backend, limit: int, role: Role | None = None) -> Frame:
        """The frame of texts in a role. Raises BrokenModel where it leaves no space for a text."""
        before, after = backend.special.prefix, backend.special.suffix
        if role is None:
            return cls(before, after, limit)._check()
        limit = limit if role.length is None else min(limit, role.length)
        if role.expansion is None:
            return cls(before, after, limit)._check()
        return cls(before, after, limit, _ids(role.expansion.token), role.expansion.length)._check()

    def within(self, limit: int | None) -> Frame:
        """The same, with at most `tokens` tokens where these are fewer. Raises BrokenModel if they leave no space."""
        return self if limit is None or limit >= self.limit else dataclasses.replace(self, limit=limit)._check()

    def around(self, bodies: Sequence[bytes], truncate: bool, direction: Direction, param: str) -> Encoded:
        """Cut the ids of texts, put them between the others, and lay them end to end.

        Raises InputError, which names `param`, for a text that is too long while `truncate` is false, or has no tokens
        where none are put around it.
        """
        overhead, truncated = self.overhead, 0
        limit = self.capacity * ID_BYTES
        lengths = array("i")
        pieces: list[bytes] = []
        for body in bodies:
            if len(body) > limit:
                if not truncate:
                    raise too_long(len(lengths), len(body) // ID_BYTES + overhead, self.limit, param)
                truncated += 1
                body = body[:limit] if direction == "right" else body[-limit:]
            tokens = len(body) // ID_BYTES + overhead
            pieces += (self.before, body, self.after)
            if tokens < self.filled:
                pieces.append(self.filler * (self.filled - tokens))
                tokens = self.filled
            lengths.append(tokens)
        if not overhead and 0 in lengths:
            index = lengths.index(0)
            raise InputError("has no tokens", param=param, subject=f"text {index}", kind="tokenizer")
        # A bytearray, because torch wants a writable array.
        ids = np.frombuffer(bytearray().join(pieces), np.int32)
        return Encoded(ids, np.frombuffer(lengths, np.int32) if lengths else np.zeros(0, np.int32), truncated)

    def _check(self) -> Frame:
        if self.capacity < 1:
            raise BrokenModel(f"special tokens leave no space for text within max_input_length {self.limit}")
        return self


def _ids(token: int) -> bytes:
    return array("i", [token]).tobytes()


def check_ids(index: int, sequence: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InputError for an id that the model does not have, or that is not an int: an array takes True for 1."""
    if sequence and (not {int} >= {*map(type, sequence)} or min(sequence) < 0 or max(sequence) >= vocab_size):
        wrong = next(i for i in sequence if type(i) is not int or not 0 <= i < vocab_size)
        raise bad_id(index, wrong, vocab_size, param)
