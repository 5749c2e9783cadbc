"""Vectors to bytes and back."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embert.engine import Task, TaskOutput
from embert.server.protocols.serialization import (
    floats_json,
    nested_floats_json,
    openai_json,
    quantize,
    sparse_json,
    typed_openai_json,
)

Floats = npt.NDArray[np.float32]
RUNNER = asyncio.Runner()  # one event loop for all examples


@pytest.fixture(scope="module", autouse=True)
def event_loop() -> Iterator[None]:
    yield
    RUNNER.close()


shapes = st.tuples(st.integers(1, 40), st.integers(1, 20))


@st.composite
def matrices(draw: st.DrawFn) -> Floats:
    """Few distinct numbers, repeated: drawing hundreds one by one would take too long."""
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return np.resize(np.array(draw(st.lists(numbers, min_size=1, max_size=23)), np.float32), draw(shapes))


@given(vectors=matrices(), base64_=st.booleans(), model=st.text())
def test_openai_json(vectors: Floats, base64_: bool, model: str) -> None:
    model = model.encode(errors="ignore").decode()
    response = json.loads(RUNNER.run(openai_json(vectors, model, 7, base64=base64_)))
    assert list(response) == ["id", "object", "data", "model", "usage"]
    assert (response["object"], response["model"]) == ("list", model)
    assert response["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    for index, (item, vector) in enumerate(zip(response["data"], vectors, strict=True)):
        assert list(item) == ["object", "embedding", "index"]
        assert (item["object"], item["index"]) == ("embedding", index)
        found = np.frombuffer(base64.b64decode(item["embedding"]), "<f4") if base64_ else item["embedding"]
        assert (np.array(found, np.float32) == vector).all()


@st.composite
def sparse_rows(draw: st.DrawFn) -> TaskOutput:
    """Pairs of some texts, of which some may have none."""
    counts = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    values = np.resize(np.array(draw(st.lists(numbers, min_size=1, max_size=23)), np.float32), (sum(counts), 1))
    indices = np.concatenate([np.sort(np.random.default_rng(i).choice(2**31 - 1, n)) for i, n in enumerate(counts)])
    return TaskOutput(values, np.cumsum([0, *counts], dtype=np.int32), indices.astype(np.int32))


def read_pairs(rows: TaskOutput) -> list[list[tuple[int, float]]]:
    texts = [rows.slice(index, index + 1) for index in range(rows.sequences)]
    return [list(zip(text.indices.tolist(), text.values[:, 0].tolist(), strict=True)) for text in texts]  # type: ignore[union-attr]


@given(rows=sparse_rows())
def test_sparse_json(rows: TaskOutput) -> None:
    body = RUNNER.run(sparse_json(rows))
    found = [[(pair["index"], float(np.float32(pair["value"]))) for pair in text] for text in json.loads(body)]
    assert found == read_pairs(rows)
    assert b" " not in body
    assert body.count(b'{"index":') == len(rows.values)


@given(rows=sparse_rows(), base64_=st.booleans())
def test_typed_openai_json(rows: TaskOutput, base64_: bool) -> None:
    dense = np.arange(rows.sequences * 3, dtype=np.float32).reshape(-1, 3) / np.float32(7)
    multi = TaskOutput(np.sqrt(np.arange(len(rows.values) * 2, dtype=np.float32)).reshape(-1, 2), rows.offsets)
    every = {Task.EMBED: TaskOutput.one_each(dense), Task.SPARSE: rows, Task.MULTI: multi}
    ids = np.arange(len(rows.values), dtype=np.int32)
    response = json.loads(RUNNER.run(typed_openai_json(every, "m", 7, base64=base64_, token_ids=ids)))
    assert (response["object"], response["model"], response["usage"]) == (
        "list",
        "m",
        {"prompt_tokens": 7, "total_tokens": 7},
    )

    def read(vector: Any) -> list[float]:
        found = np.frombuffer(base64.b64decode(vector), "<f4") if base64_ else np.array(vector, np.float32)
        return [float(number) for number in found]

    for index, item in enumerate(response["data"]):
        assert item["index"] == index
        assert read(item["embedding"]) == dense[index].tolist()
        pairs = zip(item["sparse"]["indices"], np.array(item["sparse"]["values"], np.float32).tolist(), strict=True)
        assert list(pairs) == read_pairs(rows)[index]
        assert [read(row) for row in item["multi_vector"]] == multi.slice(index, index + 1).values.tolist()
        assert item["token_ids"] == list(range(*rows.offsets[index : index + 2]))


@given(vectors=matrices())
def test_quantized(vectors: Floats) -> None:
    """Bits as sentence-transformers has them; int8 is within half a step of each number."""
    assert quantize(vectors, "ubinary").tolist() == [np.packbits(vector > 0).tolist() for vector in vectors]
    signed = quantize(vectors, "binary")
    assert signed.dtype == np.int8
    assert np.array_equal(signed.astype(int), quantize(vectors, "ubinary").astype(int) - 128)
    whole = quantize(vectors, "int8").astype(float)
    largest = np.abs(vectors).max(axis=1, keepdims=True).astype(float)
    assert np.all(np.abs(whole * (largest / 127) - vectors) <= largest / 127 * 0.501 + 1e-30)
    assert np.array_equal(quantize(vectors, "uint8").astype(int), whole + 128)


def test_whole_numbers_of_a_model_are_kept() -> None:
    vectors = np.array([[3, -0.0, 0, -1, 127, -127, 5, -2]], np.float32)
    assert quantize(vectors, "int8", whole=True).tolist() == vectors.astype(int).tolist()
    assert quantize(vectors, "ubinary", whole=True).tolist() == [[0b10101010]]


def test_other_requests_run_between_pieces() -> None:
    vectors = np.zeros((2000, 384), np.float32)
    pairs = TaskOutput(
        np.ones((60_000, 1), np.float32), np.array([0, 60_000], np.int32), np.arange(60_000, dtype=np.int32)
    )
    many = {
        Task.SPARSE: TaskOutput(pairs.values[:6000], np.arange(6001, dtype=np.int32), np.arange(6000, dtype=np.int32))
    }

    async def rounds(write: Any) -> int:
        """Rounds of the event loop in which another task ran."""
        count = 0

        async def other() -> None:
            nonlocal count
            while True:
                count += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await write
        task.cancel()
        return count

    for write in (
        floats_json(vectors),
        openai_json(vectors, "m", 1, base64=False),
        nested_floats_json(vectors, [1000, 1000]),
        sparse_json(pairs),
        typed_openai_json(many, "m", 1, base64=False),
    ):
        assert RUNNER.run(rounds(write)) > 5
