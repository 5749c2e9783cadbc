"""The server next to a replica, started as a replica starts it. No cluster."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import httpx
import msgspec
import psutil
import pytest

from embert.server.config import ServeConfig
from tests.server.live import ROOT, STAND_IN, TRUST, environment, free_port, until


@contextlib.contextmanager
def started(config: ServeConfig) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The process, and its URL."""
    command = [sys.executable, "-P", "-m", "embert.ray.server_process"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        family = {psutil.Process(process.pid)}
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            process.stdin.flush()
            yield process, f"http://127.0.0.1:{process.stdout.readline().decode().strip()}"
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                family |= set(psutil.Process(process.pid).children(recursive=True))
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/readyz", verify=TRUST).status_code == 200
    return False


def test_it_serves_on_the_loopback_and_ends_with_the_replica() -> None:
    port = free_port()
    config = ServeConfig(encoder=STAND_IN[1], workers=2, metrics_port=port)
    with started(config) as (process, url):
        until(lambda: is_ready(url), 120, what="readiness")
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 3
        listening = {each.laddr for each in psutil.Process(process.pid).net_connections("tcp")}
        assert {(host, own) for host, own in listening if own != port} == {("127.0.0.1", int(url.rpartition(":")[2]))}
        assert len(httpx.post(f"{url}/embed", json={"inputs": "a"}, verify=TRUST).json()[0]) == 384
        assert "embert_build_info" in httpx.get(f"http://127.0.0.1:{port}/metrics", verify=TRUST).text
        assert process.stdin is not None
        process.stdin.close()  # as when the replica is killed
        assert process.wait(60) == 0
        assert not any(each.is_running() for each in children)


@pytest.mark.parametrize(
    ("config", "status"),
    [(ServeConfig(model=("./no-such-model",)), 1), (ServeConfig(default_prompt_name="none", encoder=STAND_IN[1]), 2)],
)
def test_it_ends_where_it_cannot_start(config: ServeConfig, status: int) -> None:
    with started(config) as (process, _):
        assert process.wait(60) == status
