"""A model with adapters served from a GPU: requests of all adapters at once, which share batches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from embert.engine.encoders.cuda import encoder as cuda
from tests.engine.jina import INSTRUCTIONS, TASKS, VOCABULARY, flash
from tests.engine.model_cases import byte_level
from tests.server.live import live

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda.unavailable_reason() is not None, reason=cuda.unavailable_reason() or ""),
]


def test_requests_of_all_adapters_at_once(tmp_path: Path) -> None:
    jina, backend = flash(tmp_path), byte_level(VOCABULARY)
    cases = [(f"text {n}" + " of some length" * (n % 4), task) for n in range(20) for task in (None, *TASKS)]
    with live(str(tmp_path), "--device", "cuda:0") as server:

        def vector(text: str, task: str | None) -> list[float]:
            fields = {"input": text} | ({} if task is None else {"task": task})
            found: list[float] = server.post("/v1/embeddings", fields).json()["data"][0]["embedding"]
            return found

        with ThreadPoolExecutor(32) as pool:
            together = np.array(list(pool.map(lambda case: vector(*case), cases)), np.float32)
        alone = np.array([vector(*case) for case in cases[:18]], np.float32)
        info = server.get("/info").json()
    for (text, task), got in zip(cases, together, strict=True):
        pooled = jina.hidden(np.array(backend.encode(INSTRUCTIONS.get(task or "", "") + text).ids), task).mean(0)
        assert got @ (pooled / np.linalg.norm(pooled)) >= 0.9999
    assert info["backend"] == "cuda"
    if "hopper" in info["backend_choice"]:
        np.testing.assert_array_equal(together[:18], alone)
