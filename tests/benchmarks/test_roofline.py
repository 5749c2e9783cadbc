"""The kernels' benchmark: a run on a GPU; without one, rounds and ratios."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.kernels import gemm, roofline
from benchmarks.kernels.device_timer import LAUNCHES, Recorded, Timing, time_interleaved
from benchmarks.lib import record
from embert.engine.encoders.cuda import encoder as cuda


class Bench:
    """Replays of which the first half is slow, as after a rest."""

    def __init__(self, ms: float) -> None:
        self.ms, self.recorded, self.recording, self.launched = ms, 0, False, [0]

    def launch(self, i: int) -> None:
        self.recorded += 2 if self.recording else 0
        self.launched.append(i)

    def synchronize(self) -> None: ...

    def begin_recording(self) -> None:
        self.recording = True

    def end_recording(self) -> None:
        self.recording = False

    def replay(self, times: int) -> Sequence[float]:
        return [self.ms * (3 if i < times // 2 else 1) for i in range(times)]


def test_rounds() -> None:
    benches = {"one": Bench(0.5), "two": Bench(2.0)}
    recorded = {name: Recorded(bench, bench.launch) for name, bench in benches.items()}
    assert benches["one"].launched == [0, 0, *range(LAUNCHES)]
    assert recorded["one"].kernels == 2
    times = time_interleaved(recorded, Timing(rest_s=0, rounds=3, sustained=False))
    assert times == pytest.approx({"one": 50, "two": 200})  # microseconds a launch
    assert recorded["one"].us(Timing(rest_s=0, rounds=1, sustained=False)) == pytest.approx(50)


@pytest.mark.gpu
@pytest.mark.skipif(cuda.unavailable_reason() is not None, reason=cuda.unavailable_reason() or "")
def test_every_kernel_and_product_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("embert.engine._cuda_testing", reason="needs a build with EMBERT_TESTING=ON")
    written: dict[str, Any] = {}
    monkeypatch.setattr(record, "write", lambda name, figures: written.update({name: figures}))
    monkeypatch.setattr(gemm, "cutlass_kernels", lambda is_hopper: [])  # they take minutes to compile
    roofline.main(["--tokens", "512", "--rest", "0", "--rounds", "1"])  # exits if embert's products differ from torch's
    figures = written["kernels"]
    assert len(figures["kernels"]) == 6
    assert all(kernel["us"] > 0 for kernel in figures["kernels"])
    assert len(figures["products"]) == 4 + len(gemm.BERT)
    _, capability, _ = importlib.import_module("embert.engine._cuda").device_info(0)
    wanted = {"embert", "cuBLASLt"} if capability == 90 else {"cuBLASLt"}
    assert all(wanted <= product["us"].keys() for product in figures["products"])
