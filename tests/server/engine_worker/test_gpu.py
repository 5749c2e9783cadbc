"""Metrics of the GPU: there with a driver, absent without one, and never in the way of serving."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from embert.server.engine_worker.nvml import Gpu, GpuUnknown
from embert.server.observability.metrics import GPU_METRICS
from tests.server.driver import build_driver
from tests.server.live import STAND_IN, Live, live, until

GIB = 2**30
FIRST = {"memory_bytes": 21 * GIB, "memory_limit_bytes": 80 * GIB, "utilization_ratio": 0.87, "power_watts": 412.5}


def gpu_metrics(server: Live, device: str) -> dict[str, float]:
    """Name without `embert_gpu_` → value, of one device."""
    end = f'{{device="{device}"}}'
    samples = server.metrics().items()
    return {name[len("embert_gpu_") : -len(end)]: value for name, value in samples if name.endswith(end)}


def test_every_gpu_reports_what_its_driver_says(tmp_path: Path) -> None:
    """GPU 1 lacks a reading. The driver does not know GPU 7, and the log says so."""
    env = build_driver(tmp_path) | {"STAND_IN_DEVICE": "cuda"}
    with live(*STAND_IN, "--device", "x:0,1,7", env=env) as server:
        until(lambda: gpu_metrics(server, "cuda:0") == FIRST, what="the GPU's metrics")
        assert set(FIRST) == set(GPU_METRICS)
        assert server.post("/embed", {"inputs": "a"}).status_code == 200
        second = until(lambda: gpu_metrics(server, "cuda:1"), what="the GPU's metrics")
        assert second == {"memory_bytes": 75 * GIB, "memory_limit_bytes": 80 * GIB, "utilization_ratio": 0.03}
        until(lambda: "no metrics of cuda:7: cuDeviceGet(7) failed with status 6" in server.log, what="the log line")
        assert not gpu_metrics(server, "cuda:7")


def test_a_cpu_has_none(server: Live) -> None:
    assert "embert_gpu_" not in server.get("/metrics").text


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embert.server.engine_worker.nvml._DRIVER", "libembert-no-such-driver.so.1")
    with pytest.raises(GpuUnknown, match=r"libembert-no-such-driver\.so\.1 cannot be loaded"):
        Gpu("cuda:0")


@pytest.mark.gpu
def test_a_real_gpu_says_the_same_as_nvidia_smi() -> None:
    try:
        gpu = Gpu("cuda:0")
    except GpuUnknown as error:
        pytest.skip(str(error))
    asked = "--query-gpu=memory.used,memory.total,power.draw", "--format=csv,noheader,nounits", "--id=0"
    response = subprocess.run(["nvidia-smi", *asked], capture_output=True, text=True, check=True).stdout
    used, total, power = map(float, response.split(","))
    values = gpu.read()
    assert values["memory_bytes"] == pytest.approx(used * 2**20, abs=2**30)
    assert values["memory_limit_bytes"] == total * 2**20
    assert values["power_watts"] == pytest.approx(power, rel=0.5)
    assert 0 <= values["utilization_ratio"] <= 1
