"""Memory of metrics: what one process writes, any other reads, and a replacement continues."""

from __future__ import annotations

import os

import msgspec
import pytest

from embert.server.observability import metric_memory
from embert.server.observability.metric_memory import MetricMemory, value_class
from embert.server.observability.scraping import exposition


def values(memory: MetricMemory, process: str) -> type:
    """The class of values of one process, over another descriptor and other mappings."""
    region = MetricMemory(os.dup(memory.fd)).region(process)
    region.begin()
    return value_class(region, msgspec.json.encode)


def add(of: type, kind: str, name: str, amount: float, mode: str = "", help_: str = "Help.") -> None:
    sample = f"{name}_total" if kind == "counter" else name
    of(kind, name, sample, ("model",), ("é",), help_, multiprocess_mode=mode).inc(amount)


def test_processes_are_summed_and_a_replacement_continues() -> None:
    memory = MetricMemory.create(["http-0", "http-1"])
    for process, amount in (("http-0", 1), ("http-1", 2), ("http-0", 4)):
        of = values(memory, process)
        add(of, "counter", "texts", amount)
        add(of, "gauge", "open", amount, "livesum")
        add(of, "gauge", "limit", amount, "livemax")
        add(of, "gauge", "last", amount, "max")
    assert b'texts_total{model="\xc3\xa9"} 7.0' in exposition(memory).body
    memory.region("http-1").forget()
    found = exposition(memory).body
    assert b'texts_total{model="\xc3\xa9"} 7.0' in found  # totals lose nothing
    assert b'last{model="\xc3\xa9"} 5.0' in found
    assert b'open{model="\xc3\xa9"} 5.0' in found
    assert b'limit{model="\xc3\xa9"} 5.0' in found
    add(values(memory, "http-1"), "gauge", "open", 1, "livesum")
    assert b'open{model="\xc3\xa9"} 6.0' in exposition(memory).body
    assert MetricMemory(memory.fd).region("http-1").pid == os.getpid()


def test_regions_are_added_and_unknown_ones_are_an_error() -> None:
    memory = MetricMemory.create(["supervisor"])
    other = MetricMemory(memory.fd)
    memory.add(["engine-0"])
    assert [region.name for region in other.regions] == ["supervisor", "engine-0"]
    with pytest.raises(KeyError, match="engine-1"):
        other.region("engine-1")


def test_exemplars_are_replaced_as_a_whole_and_bounded() -> None:
    region = MetricMemory.create(["http-0"]).region("http-0")
    assert region.exemplars == b""
    for data in (b"a" * 100, b"b", b"c" * 50):
        region.put_exemplars(data)
        assert region.exemplars == data
    region.put_exemplars(b"d" * (metric_memory._EXEMPLAR_BYTES + 1))
    assert region.exemplars == b"c" * 50


def test_a_full_region_counts_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Series that find no room are lost, and nothing else: the process goes on."""
    memory = MetricMemory.create(["http-0"])
    of = values(memory, "http-0")
    long = "x" * (1 << 20)
    for number in range(40):  # 24 of them fit
        add(of, "counter", f"c{number}", 1, help_=long)
    found = [key for key, value in memory.region("http-0").lasting.read() if value == 1]
    assert 20 <= len(found) < 25
