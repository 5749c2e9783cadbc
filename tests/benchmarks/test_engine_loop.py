"""The engine's loop in front of a simulated GPU: the perfect server's arithmetic, and a run of the real loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.server import engine_loop
from benchmarks.server.engine_loop import batch_s, perfect_ms


def test_perfect_server_batches_what_waits() -> None:
    alone_ms, two_ms = batch_s(1000) * 1e3, batch_s(2000) * 1e3
    assert perfect_ms([0.0], 1000) == pytest.approx([alone_ms])
    # Two arrive while the first runs and share the next batch.
    latencies = perfect_ms([0.0, 1e-4, 2e-4], 1000)
    assert latencies == pytest.approx(sorted([alone_ms, alone_ms + two_ms - 0.1, alone_ms + two_ms - 0.2]))


def test_loop_finishes_every_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine_loop.main(["--seconds", "0.3", "--output", str(tmp_path)])
    assert "at random, perfect" in capsys.readouterr().out
    figures = json.loads(next(tmp_path.glob("hand-over-*.json")).read_text())["figures"]
    for found in figures["arrivals"].values():
        assert found["the loop"][0] >= figures["request_ms"]  # never faster than the encoder
