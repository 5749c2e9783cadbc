"""Vectors to bytes.

A number costs 18 ns as JSON, 1 ns as base64, and a copy as a raw row; a pair of a sparse vector costs 150 ns.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from embert.engine import Task, TaskOutput
from embert.server.http.response import Body

Vectors = npt.NDArray[np.float32]
Quantized = npt.NDArray[np.int8] | npt.NDArray[np.uint8]
P = ParamSpec("P")
T = TypeVar("T")
NumberType = Literal["int8", "uint8", "binary", "ubinary"]

_ID_PREFIX = secrets.token_hex(10).encode()  # of this process
_ids = itertools.count()

# Numbers that are written before the event loop runs other requests: less than 1 ms.
_NUMBERS_AT_ONCE = 32 * 1024
_NUMBERS_PER_PAIR = 8  # numbers that take as long as a pair
_PAIRS_AT_ONCE = _NUMBERS_AT_ONCE // _NUMBERS_PER_PAIR
_NUMBERS_PER_TEXT = 512  # numbers that take as long as the rest of a text
_BYTES_AT_ONCE = 1 << 20  # bytes that are joined at once; `bytes.join` releases the GIL from here on


class Pauses:
    """Lets the event loop run other requests after each `_NUMBERS_AT_ONCE` numbers."""

    __slots__ = ("_written",)

    def __init__(self) -> None:
        self._written = 0

    async def after(self, numbers: int) -> None:
        """Counts numbers of a text that have been written."""
        self._written += numbers + _NUMBERS_PER_TEXT
        if self._written >= _NUMBERS_AT_ONCE:
            self._written = 0
            await asyncio.sleep(0)


async def floats_json(vectors: npt.NDArray[Any], *, base64: bool = False) -> bytes:
    """`[[…], …]` for float32 [n, d] or the result of `quantize`, `[…]` for [n]; `["…", …]` with base64 of each row."""
    if vectors.size <= _NUMBERS_AT_ONCE:
        return _dump_rows(vectors, base64)
    return await join(await floats_pieces(vectors, base64=base64))


async def floats_pieces(vectors: npt.NDArray[Any], *, base64: bool = False) -> list[bytes]:
    """Returns what `floats_json` returns, in pieces for `join`."""
    if vectors.size <= _NUMBERS_AT_ONCE:
        return [_dump_rows(vectors, base64)]
    rows = max(1, _NUMBERS_AT_ONCE * len(vectors) // vectors.size)
    pieces = []
    for first in range(0, len(vectors), rows):
        pieces += [b",", _dump_rows(vectors[first : first + rows], base64)[1:-1]]
        await asyncio.sleep(0)
    pieces[0] = b"["
    pieces.append(b"]")
    return pieces


async def base64_pieces(numbers: Vectors, dtype: str) -> list[bytes]:
    """`"…"` with base64 of all numbers as `dtype`, in pieces for `join`."""
    numbers, pieces = numbers.reshape(-1), [b'"']
    step = _NUMBERS_AT_ONCE // 3 * 3  # base64 takes three bytes at a time
    for first in range(0, numbers.size, step):
        if first:
            await asyncio.sleep(0)
        with np.errstate(over="ignore"):  # what float16 cannot hold is infinite, as in vLLM
            part = np.ascontiguousarray(numbers[first : first + step], dtype)
        pieces.append(pybase64.b64encode(part.data))
    pieces.append(b'"')
    return pieces


async def join(pieces: list[bytes], separator: bytes = b"") -> bytes:
    """Joins the pieces of a response: many bytes in a thread, which frees the pieces. `bytes.join` releases the GIL."""
    if sum(map(len, pieces)) < _BYTES_AT_ONCE:
        return separator.join(pieces)
    return await asyncio.to_thread(_join, pieces, separator)


def _join(pieces: list[bytes], separator: bytes) -> bytes:
    body = separator.join(pieces)
    pieces.clear()  # takes a millisecond too
    return body


async def nested_floats_json(vectors: Vectors, lengths: Sequence[int]) -> bytes:
    """`[[[…], …], …]`: the rows of float32 [T, d], grouped by `lengths` (which add up to T)."""
    pieces, first = [b"["], 0
    pauses = Pauses()
    for index, length in enumerate(lengths):
        if index:
            pieces.append(b",")
        pieces += await floats_pieces(vectors[first : first + length])
        first += length
        await pauses.after(length * vectors.shape[1])
    pieces.append(b"]")
    return await join(pieces)


async def sparse_json(rows: TaskOutput) -> bytes:
    """`[[{"index": …, "value": …}, …], …]`: the pairs of each text."""
    texts: list[bytes] = []
    pauses = Pauses()
    for index in range(rows.sequences):
        indices, values = _pairs(rows, index)
        texts.append(b",[" if index else b"[[")
        for first in range(0, len(values), _PAIRS_AT_ONCE):
            piece = slice(first, first + _PAIRS_AT_ONCE)
            numbers = zip(_dump(indices[piece])[1:-1].split(b","), _dump(values[piece])[1:-1].split(b","), strict=True)
            pairs = b'},{"index":'.join(map(b',"value":'.join, numbers))
            texts.append(b'%b{"index":%b}' % (b"," if first else b"", pairs))
            await pauses.after(_NUMBERS_PER_PAIR * len(values[piece]))
        texts.append(b"]")
    texts.append(b"]")
    return await join(texts)


def response_id() -> bytes:
    """Returns 32 hexadecimal digits that no other response has. Does not read the system's random numbers."""
    return b"%b%012x" % (_ID_PREFIX, next(_ids))


async def compute(numbers: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls `function`, in a thread if it reads many numbers: numpy releases the GIL."""
    if numbers <= _NUMBERS_AT_ONCE:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def quantize(vectors: Vectors, kind: NumberType, *, whole: bool = False) -> Quantized:
    """float32 [n, d] as int8 or uint8 [n, d], or as bits [n, d / 8], in the ways of Cohere, Voyage and Jina.

    With `whole` they are whole numbers of a model that makes them: int8 keeps them, and a bit is 1 unless its number is
    negative, -0 included, as in the model's own code.

    int8: each vector is scaled so that its largest number is 127 or -127, which keeps cosines; uint8 is that plus 128.
    ubinary: a bit is 1 where a number is above 0, the first bit is the highest of its byte; binary is that minus 128.
    """
    if kind in ("binary", "ubinary"):
        bits = np.packbits(~np.signbit(vectors) if whole else vectors > 0, axis=1)
        return bits if kind == "ubinary" else (bits ^ 0x80).view(np.int8)
    largest = 127 if whole else np.abs(vectors).max(axis=1, keepdims=True, initial=1e-30)
    scaled: npt.NDArray[np.int8] = np.rint(vectors * (127 / largest)).astype(np.int8)
    return scaled if kind == "int8" else scaled.view(np.uint8) ^ np.uint8(0x80)


async def openai_json(vectors: Vectors | Quantized, model: str, prompt_tokens: int, *, base64: bool) -> bytes:
    """OpenAI's response with float32 [n, d], or with the result of `quantize`."""
    rows = max(1, _NUMBERS_AT_ONCE // max(1, vectors.shape[1]))
    items: list[bytes] = []
    for index, vector in enumerate(vectors):
        if index and not index % rows:
            await asyncio.sleep(0)
        embedding = _base64(vector) if base64 else _dump(vector)
        items.append(b'{"object":"embedding","embedding":%b,"index":%d}' % (embedding, index))
    head, tail = _openai_list(model, prompt_tokens)
    if vectors.shape[0] <= rows:
        return head + b",".join(items) + tail
    await asyncio.sleep(0)
    items[0], items[-1] = head + items[0], items[-1] + tail
    return await join(items, b",")


async def typed_openai_json(
    rows: Mapping[Task, TaskOutput],
    model: str,
    prompt_tokens: int,
    *,
    base64: bool,
    token_ids: npt.NDArray[np.int32] | None = None,
) -> bytes:
    """OpenAI's response with several kinds of vectors of each text: rows of EMBED, of SPARSE, of MULTI.

    `token_ids` are those of MULTI's rows.
    """
    head, tail = _openai_list(model, prompt_tokens)
    pieces = [head]
    pauses = Pauses()
    for index in range(next(iter(rows.values())).sequences):
        # Clients always read `embedding`: without dense vectors it is empty.
        embedding = b"[]"
        if Task.EMBED in rows:
            vector = rows[Task.EMBED].values[index]
            embedding = _base64(vector) if base64 else _dump(vector)
        comma = b"," if index else b""
        pieces.append(b'%b{"object":"embedding","embedding":%b,"index":%d' % (comma, embedding, index))
        if Task.SPARSE in rows:
            indices, values = [await floats_json(pair) for pair in _pairs(rows[Task.SPARSE], index)]
            pieces.append(b',"sparse":{"indices":%b,"values":%b}' % (indices, values))
        if Task.MULTI in rows:
            multi = rows[Task.MULTI]
            vectors = multi.slice(index, index + 1).values
            pieces += [b',"multi_vector":', *await floats_pieces(vectors, base64=base64)]
            if token_ids is not None:
                ids = token_ids[multi.offsets[index] : multi.offsets[index + 1]]
                pieces.append(b',"token_ids":%b' % await floats_json(ids))
        pieces.append(b"}")
        await pauses.after(sum(output.slice(index, index + 1).values.size for output in rows.values()))
    pieces.append(tail)
    return await join(pieces)


def _openai_list(model: str, prompt_tokens: int) -> tuple[bytes, bytes]:
    """Returns what comes before and after the items of a list."""
    head = b'{"id":"embd-%b","object":"list","data":[' % response_id()
    usage = b'{"prompt_tokens":%d,"total_tokens":%d}' % (prompt_tokens, prompt_tokens)
    return head, b'],"model":%b,"usage":%b}' % (orjson.dumps(model), usage)


async def raw_rows(vectors: Vectors) -> Body:
    """Little-endian float32 [n, d], row after row. A copy: `vectors` may be a part of a batch's rows."""
    rows = _little_endian(vectors)
    if rows.size <= _NUMBERS_AT_ONCE:
        return rows.tobytes()
    return (await asyncio.to_thread(rows.copy)).data.cast("B")


def _pairs(rows: TaskOutput, index: int) -> tuple[npt.NDArray[np.int32], Vectors]:
    text = rows.slice(index, index + 1)
    assert text.indices is not None  # noqa: S101 - sparse rows have them
    return text.indices, text.values[:, 0]


def _base64(vector: npt.NDArray[Any]) -> bytes:
    numbers = np.ascontiguousarray(vector) if vector.itemsize == 1 else _little_endian(vector)
    return b'"%b"' % pybase64.b64encode(numbers.data)


def _little_endian(vectors: Vectors) -> Vectors:
    return np.ascontiguousarray(vectors, "<f4")


def _dump_rows(vectors: npt.NDArray[Any], base64: bool) -> bytes:
    return b"[%b]" % b",".join(map(_base64, vectors)) if base64 else _dump(vectors)


def _dump(numbers: npt.NDArray[Any]) -> bytes:
    return orjson.dumps(np.ascontiguousarray(numbers), option=orjson.OPT_SERIALIZE_NUMPY)
