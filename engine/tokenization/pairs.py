"""Pairs of texts, as cross-encoders read them: the special tokens around and between, token types, and truncation.

A pair that is too long loses tokens of its longer text first, as CrossEncoder and text-embeddings-inference cut it:
HuggingFace's `longest_first` says how many tokens of each text stay.
"""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embert.engine.errors import BrokenModel, InputError
from embert.engine.files.chat_template import PairText
from embert.engine.heads.checkpoints.decider import LAYA_TYPES
from embert.engine.heads.description import MarkerDecider
from embert.engine.model import Model
from embert.engine.tokenization.backend import ID_BYTES, Backend, PairTemplate
from embert.engine.tokenization.encoded import (
    Chunking,
    Chunks,
    Direction,
    Encoded,
    TokenizeOptions,
    finish,
    groups,
    too_long,
)
from embert.engine.tokenization.offsets import shortened
from embert.engine.tokenization.split_points import SEEN

CHUNK_TOKENS = 131_072  # of pairs that are laid end to end in one chunk
# Texts of more tokens count as equally long, so that a request cannot have all of a long body tokenized: at most one
# token of either is at stake.
COMPARED_TOKENS = 65_536

JOINT_TOKENS = 2  # that a text may have more next to another one than alone
BYTES_A_CHARACTER = 4  # at most, in UTF-8: no token is less than a byte
MOST_TOKEN_CHARACTERS = 64  # of a text on average: bounds what is read of one that is cut to a number of tokens

# Laya's tokens of an option without its marker, of a question, and of either where options are many.
OPTION_TOKENS, QUESTION_TOKENS = 48, 16
LEAST_OPTION_TOKENS, LEAST_QUESTION_TOKENS = 4, 8

Counts = npt.NDArray[np.int64]  # tokens of each text


class Pairs:
    """Pairs of one tokenizer. Safe to use from several threads."""

    def __init__(self, backend: Backend, model: Model) -> None:
        self._backend, self._model, self._limit = backend, model, model.max_input_length
        self._template: PairTemplate | None = None  # read when first needed: most models never see a pair
        self._end: bytes | None = None  # of the chat template, likewise

    def check(self) -> PairTemplate:
        """The template. Raises BrokenModel if the tokenizer has none, or none that suits the model."""
        if self._template is None:
            template = self._backend.pair_template(_token_types(self._model))
            if self._limit - template.tokens < 2:
                raise BrokenModel(
                    f"special tokens leave no space for pairs of texts within max_input_length {self._limit}"
                )
            self._template = template
        return self._template

    def encode_chunks(
        self, firsts: Sequence[str], seconds: Sequence[str], options: TokenizeOptions, chunking: Chunking
    ) -> Chunks[Encoded]:
        if self._model.pair_text is not None:
            return (yield from self._in_template(self._model.pair_text, firsts, seconds, options, chunking))
        if isinstance(self._model.heads.decider, MarkerDecider):
            return (yield from self._at_markers(self._model.heads.decider, firsts, seconds, options, chunking))
        backend, truncate, params = self._backend, self._backend.cuts(options), (options.param, options.second_param)
        template, capacities = self._check(firsts, seconds, options)

        def too_long_first(index: int, tokens: int) -> InputError:
            return too_long(index, tokens + template.tokens - 1, self._limit, params[0], "more than ", "pair")

        def too_long_second(index: int, tokens: int) -> InputError:
            known = tokens + lengths[index % len(lengths)] + template.tokens - 1
            return too_long(index, known, self._limit, params[1], "more than ", "pair")

        def read_firsts(texts: Sequence[str], capacity: int) -> Chunks[list[bytes]]:
            return read_texts(texts, options, chunking, capacity=capacity, param=params[0], refuse=too_long_first)

        def read_seconds(texts: Sequence[str], capacity: int) -> Chunks[list[bytes]]:
            return read_texts(texts, options, chunking, capacity=capacity, param=params[1], refuse=too_long_second)

        read_texts: Callable[..., Chunks[list[bytes]]] = backend.read
        if options.only_first:
            read_texts = functools.partial(_read_distinct, backend)

        first = yield from read_firsts(firsts, capacities.first)
        lengths = [len(body) // ID_BYTES for body in first]
        if not truncate and max(lengths, default=0) > capacities.pair:
            index = next(index for index, length in enumerate(lengths) if length > capacities.pair)
            raise too_long_first(index, lengths[index])
        only_first = options.only_first
        most = capacities.second if only_first else _most_seconds(first, capacities, truncate=truncate)
        second = yield from read_seconds(seconds, most)
        if truncate and not only_first and (over := _undecided(first, second, capacities)):
            # The longer text gets the odd token: the first texts are read on, and the second ones as far as it takes to
            # know which is longer.
            again = [text if len(firsts) == 1 or index in over else "" for index, text in enumerate(firsts)]
            read = yield from read_firsts(again, COMPARED_TOKENS)
            first = [more or body for more, body in zip(read, first, strict=True)]
            most = min(max(map(len, read)) // ID_BYTES, COMPARED_TOKENS)
            again = [text if index in over else "" for index, text in enumerate(seconds)]
            read = yield from read_seconds(again, most)
            second = [more or body for more, body in zip(read, second, strict=True)]
        return (yield from self._join(template, capacities, first, second, options))

    def encode_known(self, firsts: Sequence[str], seconds: Sequence[str], options: TokenizeOptions) -> Encoded | None:
        if self._model.pair_text is not None or self._model.heads.decider is not None:
            return None
        truncate, direction = self._backend.cuts(options), options.direction or self._backend.direction
        template, capacities = self._check(firsts, seconds, options)
        first = self._backend.cached_ids(firsts, capacities.first + 1 if truncate else None, direction)
        if first is None:
            return None
        only_first = options.only_first
        limit = None
        if truncate:
            limit = (capacities.second if only_first else _most_seconds(first, capacities, truncate=True)) + 1
        second = self._backend.cached_ids(seconds, limit, direction)
        if second is None or (truncate and not only_first and _undecided(first, second, capacities)):
            return None
        return finish(self._join(template, capacities, first, second, options))

    def _in_template(
        self,
        pair_text: PairText,
        firsts: Sequence[str],
        seconds: Sequence[str],
        options: TokenizeOptions,
        chunking: Chunking,
    ) -> Chunks[Encoded]:
        """Pairs as texts of a chat template, whose end stays where a pair is cut.

        As sentence-transformers has it: the text is cut as a whole, and its last tokens become those of the template.
        """
        _check_counts(firsts, seconds, options)
        cuts = self._backend.cuts(options)
        if cuts:
            firsts = yield from self._shorten(firsts, options.first_limit, options.param, chunking)
            seconds = yield from self._shorten(seconds, options.second_limit, options.second_param, chunking)
        limit = min(options.limit or self._limit, self._limit) if cuts else self._limit
        if self._end is None:
            self._end = self._template_end(pair_text)
        end, whole, plain = self._end, firsts, pair_text
        # A text that may be cut is not read whole: it may have no split point that keeps ids.
        if cuts and options.only_first and any(len(first) > chunking.part for first in firsts):
            return (yield from self._fit_in_template(plain, whole, seconds, limit, options, chunking))
        added = truncated = 0
        if options.instruction is not None:
            pair_text = yield from self._instructed(pair_text, options, limit - len(end) // ID_BYTES, chunking)
            added = len(options.instruction)
        if limit <= len(end) // ID_BYTES:
            raise InputError(
                f"ends in {len(end) // ID_BYTES} tokens, and {limit} are allowed",
                param=options.second_param,
                subject="the chat template",
            )

        def refuse(index: int, tokens: int) -> InputError:
            return too_long(index, tokens, self._limit, options.second_param, "more than ", "pair")

        head = b""
        if len(firsts) == 1 < len(seconds) and self._split_before(seconds, pair_text.between):
            texts = [f"{pair_text.before}{firsts[0]}{pair_text.between}"]
            (head,) = yield from self._backend.read(
                texts, options, chunking, capacity=limit, param=options.second_param, refuse=refuse
            )
            firsts, pair_text = [""], PairText("", "", pair_text.after)
        firsts = [*firsts] * (len(seconds) if len(firsts) == 1 else 1)
        bodies: list[bytes] = []
        known = 0
        # A query of many documents is in memory once for each pair of a group, not for all of them.
        sizes = [added + len(first) + len(second) for first, second in zip(firsts, seconds, strict=True)]
        for group in groups(sizes, chunking.chunk):
            texts = [pair_text.joined(*pair) for pair in zip(firsts[group], seconds[group], strict=True)]
            read = yield from self._backend.read(
                texts, options, chunking, capacity=limit, param=options.second_param, refuse=refuse, first=group.start
            )
            for index, rest in enumerate(read, group.start):
                body = head + rest
                tokens = len(body) // ID_BYTES
                known += min(tokens, limit)
                if tokens <= limit:
                    bodies.append(body)
                    continue
                if not cuts:
                    raise too_long(index, tokens, self._limit, options.second_param, what="pair")
                if options.only_first:
                    return (yield from self._fit_in_template(plain, whole, seconds, limit, options, chunking))
                kept = _cut(body, limit, options.direction or self._backend.direction)
                bodies.append(kept[: len(kept) - len(end)] + end)
                truncated += 1
            if len(bodies) < len(seconds):
                yield known
        lengths = np.fromiter(map(len, bodies), np.int32, len(bodies)) // np.int32(ID_BYTES)
        _check_tokens(lengths, options)
        return Encoded(np.frombuffer(b"".join(bodies), np.int32), lengths, truncated)

    def _at_markers(
        self,
        decider: MarkerDecider,
        firsts: Sequence[str],
        seconds: Sequence[str],
        options: TokenizeOptions,
        chunking: Chunking,
    ) -> Chunks[Encoded]:
        """Rows of Laya: a second text is a question, its options each behind a marker; the first text follows them.

        The token types are the number of the question's type. Raises InputError for options that do not fit.
        """
        _check_counts(firsts, seconds, options)
        cuts = self._backend.cuts(options)
        states = [text.replace(decider.marker_text, " ") for text in firsts]
        pieces = [second.split(decider.marker_text) for second in seconds]

        cut = dataclasses.replace(options, truncate=True, direction="right")

        def read(texts: Sequence[str]) -> Chunks[list[array[int]]]:
            bodies = yield from self._backend.read(
                texts, cut, chunking, capacity=decider.most_tokens, param=options.second_param, refuse=refuse
            )
            return [array("i", body) for body in bodies]

        def refuse(index: int, tokens: int) -> InputError:
            return too_long(index, tokens, decider.most_tokens, options.param)

        questions = iter((yield from read([piece for each in pieces for piece in each])))
        bodies = yield from read(states)
        rows, types, truncated = [], [], 0
        for index, texts in enumerate(pieces):
            row = _marked_row(decider, [next(questions) for _ in texts])
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

    def _fit_in_template(
        self,
        pair_text: PairText,
        firsts: Sequence[str],
        seconds: Sequence[str],
        limit: int,
        options: TokenizeOptions,
        chunking: Chunking,
    ) -> Chunks[Encoded]:
        """Pairs whose first texts are cut to the tokens that the longest second text leaves to them.

        If one is cut, all pairs count as truncated. Raises InputError for a second text that leaves no token.
        """

        def refuse(index: int, tokens: int) -> InputError:
            return InputError(
                f"has at least {tokens} tokens in the chat template; the limit is {limit}, and `{options.param}` needs "
                "some; shorten it",
                param=options.second_param,
                subject=f"question {index}",
            )

        texts = [pair_text.joined("", second) for second in seconds]
        uncut = dataclasses.replace(options, truncate=False)
        bodies = yield from self._backend.read(
            texts, uncut, chunking, capacity=limit, param=options.second_param, refuse=refuse
        )
        lengths = [len(body) // ID_BYTES for body in bodies]
        left = limit - max(lengths, default=0) - JOINT_TOKENS
        if left < 1:
            raise refuse(lengths.index(max(lengths)), max(lengths))
        fitted = firsts
        if any(BYTES_A_CHARACTER * len(first) > left for first in firsts):
            fitted = yield from self._shorten(firsts, left, options.param, chunking)
        again = dataclasses.replace(options, only_first=False)
        encoded = yield from self._in_template(pair_text, fitted, seconds, again, chunking)
        return encoded if fitted == firsts else dataclasses.replace(encoded, truncated=len(seconds))

    def _instructed(
        self, pair_text: PairText, options: TokenizeOptions, most: int, chunking: Chunking
    ) -> Chunks[PairText]:
        """The template with the instruction of a request, whose tokens are counted once for all pairs.

        Raises InputError where the model takes none, and where it leaves less than one of `most` tokens to a pair.
        """
        param, instruction = "instruction", options.instruction or ""
        if pair_text.instructed is None:
            raise InputError("is not read by this model", param=param)
        instructed = pair_text.with_instruction(instruction)

        def refuse(_index: int, tokens: int) -> InputError:
            return InputError(
                f"has {len(instruction)} characters, and more than {tokens - 1} tokens with the text around it; the "
                f"limit is {most - 1}",
                param=param,
            )

        whole = TokenizeOptions(truncate=False)
        (head,) = yield from self._backend.read(
            [instructed.before], whole, chunking, capacity=most, param=param, refuse=refuse
        )
        if len(head) // ID_BYTES >= most:
            raise refuse(0, len(head) // ID_BYTES)
        return instructed

    def _shorten(
        self, texts: Sequence[str], limit: int | None, param: str, chunking: Chunking
    ) -> Chunks[Sequence[str]]:
        """The texts, each without what is over a number of tokens."""
        if limit is None or limit >= self._limit:
            return texts  # the pair as a whole is cut
        # A token has a character at least.
        long = [text[: limit * MOST_TOKEN_CHARACTERS] if len(text) > limit else "" for text in texts]
        cut = yield from shortened(self._backend, long, limit, param=param, most_unbroken=chunking.most_unbroken)
        return [short or text for short, text in zip(cut, texts, strict=True)]

    def _split_before(self, texts: Sequence[str], before: str) -> bool:
        """True if each text begins at a split point where it follows `before`: the tokens of both are their own."""
        points = self._backend.split_points
        if points.of_ids is None or points.lead:
            return False
        return all(points.of_ids.match(before + text[:SEEN], len(before)) for text in texts)

    def _template_end(self, pair_text: PairText) -> bytes:
        """Ids of the tokens that all pairs end in."""
        ends = [self._backend.library_ids([pair_text.joined(filler, filler)])[0] for filler in ("0", "1 2 3 4")]
        first, second = (np.frombuffer(end, np.int32)[::-1] for end in ends)
        shorter = min(len(first), len(second))
        differ = np.flatnonzero(first[:shorter] != second[:shorter])
        count = int(differ[0]) if len(differ) else 0
        return ends[0][len(ends[0]) - count * ID_BYTES :]

    def _check(
        self, firsts: Sequence[str], seconds: Sequence[str], options: TokenizeOptions
    ) -> tuple[PairTemplate, _Capacities]:
        """The template, and how many tokens of the texts fit."""
        params = (options.param, options.second_param)
        _check_counts(firsts, seconds, options)
        try:
            template = self.check()
        except BrokenModel as error:
            raise InputError(f"cannot be encoded: {error}", param=params[1], subject="pairs") from None
        cuts = self._backend.cuts(options)
        most = self._limit if options.limit is None or not cuts else min(options.limit, self._limit)
        capacity = most - template.tokens
        if capacity < 2:
            raise InputError(
                f"has at least {template.tokens + 2} tokens, and {most} are allowed",
                param=params[1],
                subject="a pair of texts",
            )
        limits = (options.first_limit, options.second_limit) if cuts else (None, None)
        first, second = (capacity if limit is None else min(limit, capacity) for limit in limits)
        return template, _Capacities(capacity, first, second)

    def _join(
        self,
        template: PairTemplate,
        capacities: _Capacities,
        firsts: Sequence[bytes],
        seconds: Sequence[bytes],
        options: TokenizeOptions,
    ) -> Chunks[Encoded]:
        """Cut the ids of texts, put them between the special tokens, and lay the pairs end to end, in chunks."""
        direction = options.direction or self._backend.direction
        firsts = [*firsts] * (len(seconds) if len(firsts) == 1 else 1)
        seconds = [*seconds]
        known_first, known_second = _counts(firsts), _counts(seconds)
        first, second = known_first, known_second
        if capacities.first < capacities.pair:  # otherwise full counts decide which text is longer
            first = np.minimum(first, capacities.first)
        if capacities.second < capacities.pair:
            second = np.minimum(second, capacities.second)
        if options.only_first and self._backend.cuts(options):
            first = self._cut_first(first, second, template, capacities, options)
        else:
            first, second = _truncated_counts(first, second, capacities.pair)
        cut = (first < known_first) | (second < known_second)
        truncated = int(np.count_nonzero(cut))
        if truncated and not self._backend.cuts(options):
            index = int(cut.argmax())
            tokens = int(known_first[index] + known_second[index]) + template.tokens
            param = options.second_param if known_first[index] < capacities.pair else options.param
            raise too_long(index, tokens, self._limit, param, what="pair")
        for index in np.flatnonzero(cut).tolist():
            firsts[index] = _cut(firsts[index], int(first[index]), direction)
            seconds[index] = _cut(seconds[index], int(second[index]), direction)
        lengths = (first + second + template.tokens).astype(np.int32)
        _check_tokens(lengths, options)
        total = int(first.sum() + second.sum()) + len(lengths) * template.tokens
        # A first text of many pairs makes many tokens of few characters: the caller sees their number before their ids.
        if total > CHUNK_TOKENS:
            yield total
        ids = np.empty(total, np.int32)
        types = None if template.types is None else np.empty(total, np.int32)
        position = 0
        for group in groups(lengths.tolist(), CHUNK_TOKENS):
            pieces: list[bytes] = []
            for first_body, second_body in zip(firsts[group], seconds[group], strict=True):
                pieces += (template.before, first_body, template.between, second_body, template.after)
            joined = np.frombuffer(b"".join(pieces), np.int32)
            ids[position : position + len(joined)] = joined
            if types is not None:
                types[position : position + len(joined)] = template.token_types(first[group], second[group])
            position += len(joined)
            if total > CHUNK_TOKENS:
                yield total
        return Encoded(ids, lengths, truncated, types)

    def _cut_first(
        self, first: Counts, second: Counts, template: PairTemplate, capacities: _Capacities, options: TokenizeOptions
    ) -> Counts:
        """The tokens of first texts that stay where second ones are whole, as by HuggingFace's `only_first`."""
        left = capacities.pair - second
        (over,) = np.nonzero(left < np.minimum(first, 1))
        if len(over):
            index = int(over[0])
            tokens, most = int(second[index]) + template.tokens, int(capacities.pair + template.tokens - 1)
            raise InputError(
                f"has at least {tokens} tokens in a pair; the limit is {most}, which leaves one for "
                f"`{options.param}`; shorten it",
                param=options.second_param,
                subject=f"text {index}",
            )
        return np.minimum(first, left)


def _marked_row(decider: MarkerDecider, pieces: Sequence[array[int]]) -> array[int]:
    """The ids of a question and its options, as Laya shortens them, up to the state."""
    head, *texts = pieces
    marked = [array("i", [decider.marker]) + text[:OPTION_TOKENS] for text in texts]
    left = decider.question_tokens - sum(map(len, marked))
    if left < QUESTION_TOKENS:
        each = max(LEAST_OPTION_TOKENS, (decider.question_tokens - QUESTION_TOKENS) // max(1, len(marked)))
        marked = [option[:each] for option in marked]
        left = decider.question_tokens - sum(map(len, marked))
    row = array("i", [decider.first]) + head[: max(LEAST_QUESTION_TOKENS, left)]
    row.append(decider.separator)
    for option in marked:
        row += option
    row.append(decider.separator)
    return row


def _read_distinct(
    backend: Backend,
    texts: Sequence[str],
    options: TokenizeOptions,
    chunking: Chunking,
    *,
    capacity: int,
    param: str,
    refuse: Callable[[int, int], InputError],
) -> Chunks[list[bytes]]:
    """Like `backend.read`, once for equal texts: each of several texts comes with every hypothesis."""
    places: dict[str, int] = {}
    for index, text in enumerate(texts):
        places.setdefault(text, index)
    indexes = [*places.values()]

    def refuse_pair(index: int, tokens: int) -> InputError:
        return refuse(indexes[index], tokens)

    bodies = yield from backend.read([*places], options, chunking, capacity=capacity, param=param, refuse=refuse_pair)
    by_text = dict(zip(places, bodies, strict=True))
    return [by_text[text] for text in texts]


def _check_tokens(lengths: npt.NDArray[np.int32], options: TokenizeOptions) -> None:
    """Raise InputError for a pair of two empty texts, where nothing is put around them."""
    if not lengths.all():
        index = int(lengths.argmin())
        raise InputError("has no tokens", param=options.second_param, subject=f"pair {index}", kind="tokenizer")


def _check_counts(firsts: Sequence[str], seconds: Sequence[str], options: TokenizeOptions) -> None:
    """Raise InputError unless there is one first text, or as many as second ones."""
    if len(firsts) not in (1, len(seconds)):
        raise InputError(
            f"has {len(firsts)} texts and `{options.second_param}` has {len(seconds)}; "
            "the former must have one text, or as many as the latter",
            param=options.param,
        )


def _token_types(model: Model) -> int:
    """Number of token types that the model has and gets: some tokenizers do not name them among its inputs."""
    return model.config.type_vocab_size if model.tokenizer.has_token_types else 1


@dataclass(frozen=True, slots=True)
class _Capacities:
    """Numbers of tokens that fit, without the special ones."""

    pair: int
    first: int
    second: int


def _most_seconds(firsts: Sequence[bytes], capacities: _Capacities, *, truncate: bool) -> int:
    """The most tokens of a second text that can matter, next to these first texts."""
    lengths = [min(len(body) // ID_BYTES, capacities.first) for body in firsts]
    most = capacities.pair - min(lengths, default=0)
    if truncate:  # enough to know which text is the longer one
        most = max(most, min(max(lengths, default=0), capacities.pair))
    return min(most, capacities.second)


def _undecided(firsts: Sequence[bytes], seconds: Sequence[bytes], capacities: _Capacities) -> set[int]:
    """Pairs whose longer text is unknown and gets the odd token: both texts are longer than the capacity."""
    if capacities.pair % 2 == 0 or capacities.first < capacities.pair or capacities.second < capacities.pair:
        return set()
    size, shared = capacities.pair * ID_BYTES, len(firsts) == 1
    if max(map(len, firsts), default=0) <= size:
        return set()
    return {
        index for index, body in enumerate(seconds) if len(body) > size and len(firsts[0 if shared else index]) > size
    }


def _counts(bodies: Sequence[bytes]) -> Counts:
    return np.fromiter(map(len, bodies), np.int64, len(bodies)) // ID_BYTES


def _truncated_counts(first: Counts, second: Counts, capacity: int) -> tuple[Counts, Counts]:
    """Numbers of tokens of the first and of the second text of each pair that stay, where `capacity` tokens fit.

    As truncate_encodings of the tokenizers library has it: the shorter text keeps up to half of the capacity, the
    longer one gets the rest, and of two equally long ones the second counts as the longer.
    """
    most = max(COMPARED_TOKENS, capacity) + 1
    first, second = np.minimum(first, most), np.minimum(second, most)
    shorter, fits = np.minimum(np.minimum(first, second), capacity // 2), first + second <= capacity
    kept_second = np.where(fits, second, np.where(first > second, shorter, capacity - shorter))
    return np.where(fits, first, capacity - kept_second), kept_second


def _cut(body: bytes, tokens: int, direction: Direction) -> bytes:
    size = tokens * ID_BYTES
    return body[:size] if direction == "right" else body[len(body) - size :]
