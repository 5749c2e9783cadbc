"""HTTP processes grow with the machine's cores, but not those of the tests' servers: they are the same everywhere."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from embert.server.cli.main import parse_serve
from embert.server.config import ServeConfig
from tests.server.engine_worker.harness import Harness
from tests.server.live import Live, environment


def pretend_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4), (192, 4)])
def test_the_default_is_one_for_every_four_cores(monkeypatch: pytest.MonkeyPatch, cores: int, processes: int) -> None:
    pretend_cores(monkeypatch, cores)
    assert ServeConfig().http_processes == processes
    assert ServeConfig(workers=3).http_processes == 3


def test_a_server_of_the_tests_has_one_unless_it_is_started_with_more(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_cores(monkeypatch, 16)
    for variables in (environment(), psutil.Process(server.process.pid).environ()):
        assert parse_serve([], variables).http_processes == 1
        assert parse_serve(["--workers", "2"], variables).http_processes == 2
        assert parse_serve(["--workers", "0"], variables).http_processes == 4


def test_an_engine_in_threads_has_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cores(monkeypatch, 16)
    Harness(tmp_path).close()
