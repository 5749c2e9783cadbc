"""Pairs between special tokens, as cross-encoders of BERT's kind read them, with token types, and their truncation.

A pair that is too long loses tokens of its longer text first, as CrossEncoder and text-embeddings-inference cut it:
HuggingFace's `longest_first` says how many tokens of each text stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embert.engine.errors import BrokenModel, InputError
from embert.engine.model import Model
from embert.engine.tokenization.backend import ID_BYTES, Backend, PairTemplate
from embert.engine.tokenization.encoded import Chunks, Encoded, TokenizeOptions, finish, groups, too_long
from embert.engine.tokenization.pairs.request import PairRequest, check_tokens, cut

CHUNK_TOKENS = 131_072  # of pairs that are laid end to end in one chunk
# Texts of more tokens count as equally long, so that a request cannot have all of a long body tokenized: at most one
# token of either is at stake.
COMPARED_TOKENS = 65_536

Counts = npt.NDArray[np.int64]  # tokens of each text
Refuse = Callable[[int, int], InputError]  # from a text's index and its number of tokens


class SpecialTokenPairs:
    """Pairs of one tokenizer."""

    def __init__(self, backend: Backend, model: Model) -> None:
        self._backend, self._model, self._limit = backend, model, model.max_input_length
        self._template: PairTemplate | None = None  # read when first needed: most models never see a pair

    def _read_template(self) -> PairTemplate:
        """The template. Raises BrokenModel if the tokenizer has none, or none that suits the model."""
        if self._template is None:
            template = self._backend.pair_template(_token_types(self._model))
            if self._limit - template.tokens < 2:
                raise BrokenModel(
                    f"special tokens leave no space for pairs of texts within max_input_length {self._limit}"
                )
            self._template = template
        return self._template

    def encode_chunks(self, request: PairRequest) -> Chunks[Encoded]:
        firsts, seconds, options, chunking = request.firsts, request.seconds, request.options, request.chunking
        backend, truncate, params = self._backend, self._backend.cuts(options), (options.param, options.second_param)
        template, capacities = self._check(options)

        def too_long_first(index: int, tokens: int) -> InputError:
            return too_long(index, tokens + template.tokens - 1, self._limit, params[0], "more than ", "pair")

        def too_long_second(index: int, tokens: int) -> InputError:
            known = tokens + lengths[index % len(lengths)] + template.tokens - 1
            return too_long(index, known, self._limit, params[1], "more than ", "pair")

        def read_firsts(texts: Sequence[str], capacity: int) -> Chunks[list[bytes]]:
            return read_texts(texts, capacity, params[0], too_long_first)

        def read_seconds(texts: Sequence[str], capacity: int) -> Chunks[list[bytes]]:
            return read_texts(texts, capacity, params[1], too_long_second)

        def read_texts(texts: Sequence[str], capacity: int, param: str, refuse: Refuse) -> Chunks[list[bytes]]:
            once = options.only_first  # each of several texts comes with every hypothesis
            distinct = [*dict.fromkeys(texts)] if once else texts

            def refuse_text(index: int, tokens: int) -> InputError:
                return refuse(texts.index(distinct[index]) if once else index, tokens)

            bodies = yield from backend.read(
                distinct, options, chunking, capacity=capacity, param=param, refuse=refuse_text
            )
            if not once:
                return bodies
            by_text = dict(zip(distinct, bodies, strict=True))
            return [by_text[text] for text in texts]

        first = yield from read_firsts(firsts, capacities.first)
        lengths = [len(body) // ID_BYTES for body in first]
        if not truncate and max(lengths, default=0) > capacities.pair:
            index = next(index for index, length in enumerate(lengths) if length > capacities.pair)
            raise too_long_first(index, lengths[index])
        only_first = options.only_first
        most = capacities.second if only_first else _most_seconds(first, capacities, truncate=truncate)
        second = yield from read_seconds(seconds, most)
        if truncate and not only_first and (over := _ties(first, second, capacities)):
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

    def encode_known(self, request: PairRequest) -> Encoded | None:
        firsts, seconds, options = request.firsts, request.seconds, request.options
        truncate, direction = self._backend.cuts(options), options.direction or self._backend.direction
        template, capacities = self._check(options)
        first = self._backend.cached_ids(firsts, capacities.first + 1 if truncate else None, direction)
        if first is None:
            return None
        only_first = options.only_first
        limit = None
        if truncate:
            limit = (capacities.second if only_first else _most_seconds(first, capacities, truncate=True)) + 1
        second = self._backend.cached_ids(seconds, limit, direction)
        if second is None or (truncate and not only_first and _ties(first, second, capacities)):
            return None
        return finish(self._join(template, capacities, first, second, options))

    def _check(self, options: TokenizeOptions) -> tuple[PairTemplate, _Capacities]:
        """The template, and how many tokens of the texts fit."""
        param = options.second_param
        try:
            template = self._read_template()
        except BrokenModel as error:
            raise InputError(f"cannot be encoded: {error}", param=param, subject="pairs") from None
        cuts = self._backend.cuts(options)
        most = self._limit if options.limit is None or not cuts else min(options.limit, self._limit)
        capacity = most - template.tokens
        if capacity < 2:
            raise InputError(
                f"has at least {template.tokens + 2} tokens, and {most} are allowed",
                param=param,
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
        is_cut = (first < known_first) | (second < known_second)
        truncated = int(np.count_nonzero(is_cut))
        if truncated and not self._backend.cuts(options):
            index = int(is_cut.argmax())
            tokens = int(known_first[index] + known_second[index]) + template.tokens
            param = options.second_param if known_first[index] < capacities.pair else options.param
            raise too_long(index, tokens, self._limit, param, what="pair")
        for index in np.flatnonzero(is_cut).tolist():
            firsts[index] = cut(firsts[index], int(first[index]), direction)
            seconds[index] = cut(seconds[index], int(second[index]), direction)
        lengths = (first + second + template.tokens).astype(np.int32)
        check_tokens(lengths, options)
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
            group_ids = np.frombuffer(b"".join(pieces), np.int32)
            ids[position : position + len(group_ids)] = group_ids
            if types is not None:
                types[position : position + len(group_ids)] = template.token_types(first[group], second[group])
            position += len(group_ids)
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


def _ties(firsts: Sequence[bytes], seconds: Sequence[bytes], capacities: _Capacities) -> set[int]:
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
