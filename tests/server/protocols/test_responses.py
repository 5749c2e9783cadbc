"""Vectors to bytes and back."""

from __future__ import annotations

import asyncio
import threading
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embert.engine import Task, TaskOutput
from embert.server.protocols import serialization
from embert.server.protocols.ranking import join_rows
from embert.server.protocols.serialization import (
    base64_pieces,
    floats_json,
    nested_floats_json,
    openai_json,
    quantize,
    raw_rows,
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

    multi = {Task.MULTI: TaskOutput(vectors, np.array([0, len(vectors)], np.int32))}

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
        floats_json(vectors, base64=True),
        base64_pieces(vectors, "<f2"),
        nested_floats_json(vectors, [1000, 1000]),
        nested_floats_json(vectors, [2] * 1000),
        sparse_json(pairs),
        typed_openai_json(many, "m", 1, base64=False),
        typed_openai_json(multi, "m", 1, base64=True),
    ):
        assert RUNNER.run(rounds(write)) > 5


def test_large_responses_are_not_copied_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = np.random.default_rng(1).standard_normal((800, 384)).astype(np.float32)
    multi = {Task.MULTI: TaskOutput(vectors, np.array([0, len(vectors)], np.int32))}
    threads: list[threading.Thread] = []

    def in_thread(pieces: list[bytes], separator: bytes) -> bytes:
        threads.append(threading.current_thread())
        return separator.join(pieces)

    monkeypatch.setattr(serialization, "_join", in_thread)
    for base64 in (False, True):
        rows = [b64encode(vector.tobytes()).decode() for vector in vectors] if base64 else vectors
        written = orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)
        assert RUNNER.run(floats_json(vectors, base64=base64)) == written
        for write in (openai_json(vectors, "m", 1, base64=base64), typed_openai_json(multi, "m", 1, base64=base64)):
            assert len(orjson.loads(RUNNER.run(write))["data"]) in (1, 800)
    text = b"x" * 10_000
    assert RUNNER.run(join_rows(text for _ in range(200))) == b",".join([text] * 200)
    assert len(threads) == 7
    assert threading.main_thread() not in threads

    assert RUNNER.run(raw_rows(vectors)) == vectors.tobytes()
    assert not np.shares_memory(
        np.frombuffer(RUNNER.run(raw_rows(vectors)), np.float32), vectors
    )  # they may be a part of a batch
