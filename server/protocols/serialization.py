"""Vectors to bytes.

A number costs 18 ns as JSON, 1 ns as base64, and nothing as a raw row; a pair of a sparse vector costs 150 ns.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from embert.engine import Task, TaskOutput

Vectors = npt.NDArray[np.float32]
Quantized = npt.NDArray[np.int8] | npt.NDArray[np.uint8]
NumberType = Literal["int8", "uint8", "binary", "ubinary"]

_ID_PREFIX = secrets.token_hex(10).encode()  # of this process
_ids = itertools.count()

# Numbers that are written before the event loop runs other requests: about 1 ms.
_NUMBERS_AT_ONCE = 64 * 1024
_NUMBERS_PER_PAIR = 8  # numbers that take as long as a pair
_PAIRS_AT_ONCE = _NUMBERS_AT_ONCE // _NUMBERS_PER_PAIR
_NUMBERS_PER_TEXT = 512  # numbers that take as long as the rest of a text


class Pauses:
    """Lets the event loop run other requests after every millisecond of writing."""

    __slots__ = ("_written",)

    def __init__(self) -> None:
        self._written = 0

    async def after(self, numbers: int) -> None:
        """Counts numbers of a text that have been written."""
        self._written += numbers + _NUMBERS_PER_TEXT
        if self._written >= _NUMBERS_AT_ONCE:
            self._written = 0
            await asyncio.sleep(0)


async def floats_json(vectors: npt.NDArray[Any]) -> bytes:
    """`[[…], …]` for float32 [n, d] or the result of `quantize`, `[…]` for [n]."""
    rows = max(1, _NUMBERS_AT_ONCE * len(vectors) // max(1, vectors.size))
    if len(vectors) <= rows:
        return _dump(vectors)
    pieces = []
    for first in range(0, len(vectors), rows):
        pieces.append(_dump(vectors[first : first + rows])[1:-1])
        await asyncio.sleep(0)
    return b"[" + b",".join(pieces) + b"]"


async def nested_floats_json(vectors: Vectors, lengths: Sequence[int]) -> bytes:
    """`[[[…], …], …]`: the rows of float32 [T, d], grouped by `lengths` (which add up to T)."""
    pieces, first = [], 0
    for length in lengths:
        pieces.append(await floats_json(vectors[first : first + length]))
        first += length
    return b"[" + b",".join(pieces) + b"]"


async def sparse_json(rows: TaskOutput) -> bytes:
    """`[[{"index": …, "value": …}, …], …]`: the pairs of each text."""
    texts: list[bytes] = []
    pauses = Pauses()
    for index in range(rows.sequences):
        indices, values = _pairs(rows, index)
        pieces = []
        for first in range(0, len(values), _PAIRS_AT_ONCE):
            piece = slice(first, first + _PAIRS_AT_ONCE)
            numbers = zip(_dump(indices[piece])[1:-1].split(b","), _dump(values[piece])[1:-1].split(b","), strict=True)
            pieces.append(b'{"index":%b}' % b'},{"index":'.join(map(b',"value":'.join, numbers)))
            await pauses.after(_NUMBERS_PER_PAIR * len(values[piece]))
        texts.append(b"[%b]" % b",".join(pieces))
    return b"[" + b",".join(texts) + b"]"


async def rows_json(rows: npt.NDArray[Any], *, base64: bool = False) -> bytes:
    """`[[…], …]` for [n, d] of any type, or `["…", …]` with base64 of each row."""
    if not base64:
        return await floats_json(rows)
    return b"[%b]" % b",".join(map(_base64, rows))


def response_id() -> bytes:
    """Returns 32 hexadecimal digits that no other response has. Does not read the system's random numbers."""
    return b"%b%012x" % (_ID_PREFIX, next(_ids))


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
    return _openai_list(items, model, prompt_tokens)


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
    items: list[bytes] = []
    pauses = Pauses()
    for index in range(next(iter(rows.values())).sequences):
        # Clients always read `embedding`: without dense vectors it is empty.
        embedding, more = b"[]", b""
        if Task.EMBED in rows:
            vector = rows[Task.EMBED].values[index]
            embedding = _base64(vector) if base64 else _dump(vector)
        if Task.SPARSE in rows:
            indices, values = [await floats_json(pair) for pair in _pairs(rows[Task.SPARSE], index)]
            more += b',"sparse":{"indices":%b,"values":%b}' % (indices, values)
        if Task.MULTI in rows:
            multi = rows[Task.MULTI]
            vectors = multi.slice(index, index + 1).values
            written = b"[%b]" % b",".join(map(_base64, vectors)) if base64 else await floats_json(vectors)
            more += b',"multi_vector":%b' % written
            if token_ids is not None:
                ids = token_ids[multi.offsets[index] : multi.offsets[index + 1]]
                more += b',"token_ids":%b' % await floats_json(ids)
        items.append(b'{"object":"embedding","embedding":%b,"index":%d%b}' % (embedding, index, more))
        await pauses.after(sum(output.slice(index, index + 1).values.size for output in rows.values()))
    return _openai_list(items, model, prompt_tokens)


def _openai_list(items: list[bytes], model: str, prompt_tokens: int) -> bytes:
    head = b'{"id":"embd-%b","object":"list","data":[' % response_id()
    tail = b'],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (
        orjson.dumps(model),
        prompt_tokens,
        prompt_tokens,
    )
    return head + b",".join(items) + tail


def raw_rows(vectors: Vectors) -> bytes:
    """Little-endian float32 [n, d], row after row."""
    return _little_endian(vectors).tobytes()


def _pairs(rows: TaskOutput, index: int) -> tuple[npt.NDArray[np.int32], Vectors]:
    text = rows.slice(index, index + 1)
    assert text.indices is not None  # noqa: S101 - sparse rows have them
    return text.indices, text.values[:, 0]


def _base64(vector: npt.NDArray[Any]) -> bytes:
    numbers = np.ascontiguousarray(vector) if vector.itemsize == 1 else _little_endian(vector)
    return b'"%b"' % pybase64.b64encode(numbers.data)


def _little_endian(vectors: Vectors) -> Vectors:
    return np.ascontiguousarray(vectors, "<f4")


def _dump(numbers: npt.NDArray[Any]) -> bytes:
    return orjson.dumps(np.ascontiguousarray(numbers), option=orjson.OPT_SERIALIZE_NUMPY)
