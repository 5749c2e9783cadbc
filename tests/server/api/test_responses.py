"""Vectors to bytes and back."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embert.server.api.serialization import floats_json, nested_floats_json, openai_json, raw_rows

Floats = npt.NDArray[np.float32]

shapes = st.tuples(st.integers(1, 40), st.integers(1, 20))


@st.composite
def matrices(draw: st.DrawFn) -> Floats:
    """Few distinct numbers, repeated: drawing hundreds one by one would take too long."""
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return np.resize(np.array(draw(st.lists(numbers, min_size=1, max_size=23)), np.float32), draw(shapes))


def from_json(body: bytes) -> Floats:
    return np.array(json.loads(body), np.float32)


@given(vectors=matrices())
def test_floats_json(vectors: Floats) -> None:
    body = asyncio.run(floats_json(vectors))
    assert (from_json(body) == vectors).all()  # the shortest decimals that are the same float32
    assert b" " not in body


@given(vectors=matrices(), base64_=st.booleans(), model=st.text())
def test_openai_json(vectors: Floats, base64_: bool, model: str) -> None:
    model = model.encode(errors="ignore").decode()
    answer = json.loads(asyncio.run(openai_json(vectors, model, 7, base64=base64_)))
    assert list(answer) == ["object", "data", "model", "usage"]
    assert (answer["object"], answer["model"]) == ("list", model)
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    for index, (item, vector) in enumerate(zip(answer["data"], vectors, strict=True)):
        assert list(item) == ["object", "embedding", "index"]
        assert (item["object"], item["index"]) == ("embedding", index)
        found = np.frombuffer(base64.b64decode(item["embedding"]), "<f4") if base64_ else item["embedding"]
        assert (np.array(found, np.float32) == vector).all()


@given(vectors=matrices(), data=st.data())
def test_nested_floats_json(vectors: Floats, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(vectors) - 1)), max_size=5)) | {0, len(vectors)})
    lengths = np.diff(cuts).tolist()
    groups = json.loads(asyncio.run(nested_floats_json(vectors, lengths)))
    assert [len(group) for group in groups] == lengths
    assert (np.array(list(itertools.chain(*groups)), np.float32) == vectors).all()


def test_raw_rows() -> None:
    vectors = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert raw_rows(vectors) == vectors.astype("<f4").tobytes()
    assert raw_rows(vectors[:, :2]) == vectors[:, :2].copy().tobytes()  # a cut is not contiguous


@pytest.mark.parametrize("rows", [170, 171, 172, 400])
def test_many_rows_are_written_in_pieces(rows: int) -> None:
    vectors = np.random.default_rng(0).standard_normal((rows, 384)).astype(np.float32)
    assert (from_json(asyncio.run(floats_json(vectors))) == vectors).all()
    assert (from_json(asyncio.run(floats_json(vectors[:, :100]))) == vectors[:, :100]).all()


def test_others_get_their_turn_between_pieces() -> None:
    vectors = np.zeros((2000, 384), np.float32)

    async def count(write: Any) -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await write
        task.cancel()
        return turns

    assert asyncio.run(count(floats_json(vectors))) > 5
    assert asyncio.run(count(openai_json(vectors, "m", 1, base64=False))) > 5
    assert asyncio.run(count(nested_floats_json(vectors, [1000, 1000]))) > 5
