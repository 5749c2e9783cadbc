"""Tokens with their offsets in the text, in chunks: for /tokenize, and for entities, whose texts may be divided."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from embert.engine.errors import TokenizerFailed
from embert.engine.tokenization.backend import ID_BYTES, Backend
from embert.engine.tokenization.encoded import (
    Chunks,
    Direction,
    Encoded,
    EncodedSpans,
    TokenInfo,
    check_unicode,
    groups,
    too_long,
    untokenizable,
)
from embert.engine.tokenization.split_points import TextParts

CHUNK_CHARACTERS = 8_192
CHUNK_TOKENS = 131_072  # of sequences that are laid end to end in one chunk


class _Part(NamedTuple):
    """The next tokens of one text."""

    number: int  # the text's
    is_first: bool
    is_last: bool
    ids: list[int]
    offsets: list[tuple[int, int]]  # in `text`
    text: str
    shift: int  # from offsets in `text` to those in the whole text


def tokens_with_offsets(
    backend: Backend, texts: Sequence[str], prompt: str, *, add_special_tokens: bool, param: str, most_unbroken: int
) -> Iterator[list[tuple[int, list[TokenInfo]]]]:
    """Yield the next tokens of some texts in each chunk, each list with the text's index. Nothing is cut.

    `prompt` goes before every text, and offsets count from its first character. Raises InputTooLarge, before the work,
    for a text without a split point for over `most_unbroken` characters, and InputError for a lone surrogate.
    """
    special = backend.special
    for parts in _parts(backend, [prompt + text for text in texts], param=param, most_unbroken=most_unbroken):
        infos: list[tuple[int, list[TokenInfo]]] = []
        for part in parts:
            tokens = [
                TokenInfo(token_id, part.text[start:stop], False, start + part.shift, stop + part.shift)
                for token_id, (start, stop) in zip(part.ids, part.offsets, strict=True)
            ]
            if add_special_tokens and part.is_first:
                tokens = special.before + tokens
            if add_special_tokens and part.is_last:
                tokens += special.after
            infos.append((part.number, tokens))
        yield infos


def shorten(
    backend: Backend, texts: Sequence[str], tokens: int, *, param: str, most_unbroken: int
) -> Chunks[list[str]]:
    """The beginning of each text up to a number of tokens, in chunks. Raises as `tokens_with_offsets`."""
    result = [*texts]
    counts = [0] * len(texts)
    for parts in _parts(backend, texts, param=param, most_unbroken=most_unbroken, most=tokens + 1):
        for part in parts:
            left = tokens - counts[part.number]
            if 0 < left < len(part.ids) or (left == len(part.ids) and not part.is_last):
                result[part.number] = texts[part.number][: part.offsets[left - 1][1] + part.shift]
            counts[part.number] += len(part.ids)
        yield sum(counts)
    return result


class Window(NamedTuple):
    """Division of texts into sequences of a model."""

    capacity: int  # tokens of a text, without the special ones
    stride: int | None  # tokens that a sequence shares with the next; None: there is one
    cuts: bool  # whether the rest is cut off where there is one, or the text refused
    direction: Direction  # the end of a text that is cut off


def encode_spans(
    backend: Backend, texts: Sequence[str], window: Window, *, param: str, most_unbroken: int
) -> Chunks[EncodedSpans]:
    """Texts as sequences between special tokens, in chunks, with the offsets of their tokens.

    Of a text that is cut at its end only as many characters are read as have these tokens. A text without tokens has no
    sequence where there are no special tokens. Raises as `tokens_with_offsets`, and InputError for a text that is too
    long and not to be cut.
    """
    bodies = [array("i") for _ in texts]
    spans = [array("i") for _ in texts]  # start and stop of each token
    reads_all = window.stride is not None or (window.cuts and window.direction == "left")
    most = None if reads_all else window.capacity + 1
    total = 0
    for parts in _parts(backend, texts, param=param, most_unbroken=most_unbroken, most=most):
        for part in parts:
            body = bodies[part.number]
            known = len(body)
            body.extend(part.ids)
            for start, stop in part.offsets:
                spans[part.number].extend((start + part.shift, stop + part.shift))
            if window.stride is None:  # what is cut off does not count
                total += min(len(body), window.capacity) - min(known, window.capacity)
            else:
                total += len(part.ids)
        yield total
    ids: list[bytes] = []
    offsets: list[bytes] = []
    lengths, windows, truncated = array("i"), array("i"), 0
    before, after = backend.special.prefix, backend.special.suffix
    overhead = (len(before) + len(after)) // ID_BYTES
    if window.stride:  # few tokens may be in many sequences: the caller sees their number before their ids
        total = sum(_tokens_in_windows(len(body), window, overhead) for body in bodies)
        yield total
    since_yield = 0
    outside = array("i", [-1, -1]).tobytes()  # the characters of a special token
    outside_before, outside_after = (outside * (len(each) // ID_BYTES) for each in (before, after))
    for index, (body, places) in enumerate(zip(bodies, spans, strict=True)):
        if window.stride is None and len(body) > window.capacity:
            if not window.cuts:
                limit = window.capacity + overhead
                raise too_long(index, limit, limit, param, "more than ")
            truncated += 1
        ranges = _ranges(len(body), window) if len(body) + overhead else []
        windows.append(len(ranges))
        for start, stop in ranges:
            span = places[2 * start : 2 * stop]
            if start and backend.keeps_first_space:
                span[0], span[1] = backend.with_first_space(body[start], span[0], span[1])
            ids += (before, body[start:stop].tobytes(), after)
            offsets += (outside_before, span.tobytes(), outside_after)
            lengths.append(stop - start + overhead)
            since_yield += lengths[-1]
            if since_yield >= CHUNK_TOKENS:
                since_yield = 0
                yield total
    pairs = np.frombuffer(b"".join(offsets), np.int32).reshape(-1, 2)
    encoded = Encoded(
        np.frombuffer(bytearray().join(ids), np.int32),  # a bytearray, because torch wants a writable array
        np.array(lengths, np.int32),
        truncated,
    )
    return EncodedSpans(encoded, pairs[:, 0], pairs[:, 1], np.array(windows, np.int32))


def _tokens_in_windows(tokens: int, window: Window, overhead: int) -> int:
    """The tokens of all sequences of a text that is read with a stride, special ones included."""
    assert window.stride is not None  # noqa: S101 - the caller asks where there is one
    repeats = max(0, -((window.capacity - tokens) // (window.capacity - window.stride)))
    return tokens + repeats * window.stride + (repeats + 1) * overhead


def _ranges(tokens: int, window: Window) -> list[tuple[int, int]]:
    """The tokens of each sequence of a text, as truncate of the tokenizers library has them."""
    capacity = window.capacity
    step = capacity - (window.stride or 0)
    repeats = max(0, -((capacity - tokens) // step)) if window.stride is not None else 0
    ranges = [(step * number, min(step * number + capacity, tokens)) for number in range(repeats + 1)]
    return ranges if window.direction == "right" else [(tokens - stop, tokens - start) for start, stop in ranges]


def _parts(
    backend: Backend, texts: Sequence[str], *, param: str, most_unbroken: int, most: int | None = None
) -> Iterator[list[_Part]]:
    """The next tokens of some texts in each chunk. `most`: number of first tokens needed of each text; None: all."""
    for group in groups([min(len(text), CHUNK_CHARACTERS) for text in texts], CHUNK_CHARACTERS):
        parts = {
            index: TextParts(
                texts[index], backend.split_points, "right", most_unbroken, index=index, param=param, offsets=True
            )
            for index in range(group.start, group.stop)
        }
        counts = dict.fromkeys(parts, 0)
        is_first = True
        while parts:
            try:
                chunk = list(_next_tokens(backend, parts, param, is_first=is_first))
            except TypeError:
                check_unicode(texts, param)
                raise
            yield chunk
            for part in chunk:
                counts[part.number] += len(part.ids)
            parts = {
                index: part for index, part in parts.items() if part.more and (most is None or counts[index] < most)
            }
            is_first = False


def _next_tokens(backend: Backend, parts: dict[int, TextParts], param: str, *, is_first: bool) -> Iterator[_Part]:
    starts = [part.start for part in parts.values()]
    chunks = [part.take(CHUNK_CHARACTERS) for part in parts.values()]
    try:
        encodings = backend.encodings([text for _, text in chunks])
    except TokenizerFailed:
        for index, (_, text) in zip(parts, chunks, strict=True):
            try:
                backend.encodings([text])
            except TokenizerFailed as error:
                raise untokenizable(index, str(error), param) from error
        raise
    for (index, part), text_start, (led, text), encoding in zip(parts.items(), starts, chunks, encodings, strict=True):
        first = backend.lead_tokens if led else 0
        shift = text_start - (len(backend.split_points.lead) if led else 0)
        yield _Part(index, is_first, not part.more, encoding.ids[first:], encoding.offsets[first:], text, shift)
