"""The private names of other projects that the server uses: after an upgrade this file names what is gone.

pyproject.toml therefore bounds uvicorn and prometheus-client by their next minor release.
"""

from __future__ import annotations

import importlib

import pytest
from prometheus_client import Histogram, Metric
from prometheus_client.multiprocess import MultiProcessCollector

NAMES = {
    "uvicorn._types": ("ASGIReceiveEvent", "ASGISendEvent"),
    "uvicorn.protocols.http.flow_control": ("HIGH_WATER_LIMIT", "FlowControl"),
    "uvicorn.protocols.http.httptools_impl": ("STATUS_LINE", "HttpToolsProtocol", "RequestResponseCycle"),
    "uvicorn.server": ("Server.capture_signals",),
    "prometheus_client.multiprocess": ("MultiProcessCollector._accumulate_metrics",),
    "prometheus_client.utils": ("floatToGoString",),
    "prometheus_client.values": ("ValueClass",),
}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_private_name_exists(module: str, name: str) -> None:
    value: object = importlib.import_module(module)
    for attribute in name.split("."):
        value = getattr(value, attribute)


def test_values_of_processes_are_joined_by_mode() -> None:
    metric = Metric("private_names", "help", "gauge")
    metric._multiprocess_mode = "max"  # type: ignore[attr-defined]
    for value in (2.0, 1.0):
        metric.add_sample("private_names", (), value)  # type: ignore[arg-type]
    (joined,) = MultiProcessCollector._accumulate_metrics({"private_names": metric}, accumulate=True)  # type: ignore[no-untyped-call]
    assert [sample.value for sample in joined.samples] == [2.0]


def test_a_histogram_has_buckets_and_a_sum() -> None:
    histogram = Histogram("private_names", "help", registry=None, buckets=(1.0,))
    assert len(histogram._buckets) == 2
    assert histogram._sum.get() == 0.0
