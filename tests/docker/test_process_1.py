"""`embert serve` as process 1, for which the kernel ignores every signal that the process does not handle."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.live import ROOT, STAND_IN, environment, until

COMMAND = [sys.executable, "-m", "embert.server.cli.main", "serve", "--host", "127.0.0.1", "--port", "0"]


@pytest.fixture
def in_namespace() -> list[str]:
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("needs root and unshare, for a namespace of processes")
    return [unshare, "--pid", "--fork", "--kill-child"]


@contextmanager
def process_1(in_namespace: list[str], log: Path, *arguments: str, **own: str) -> Iterator[subprocess.Popen[bytes]]:
    """`embert serve` as process 1, with further environment variables. Kills what is left of it at the end."""
    with (
        log.open("wb") as file,
        subprocess.Popen([*in_namespace, *COMMAND, *arguments], cwd=ROOT, env=environment(own), stderr=file) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def stop(process: subprocess.Popen[bytes], log: Path, said: str) -> int:
    """SIGTERM to process 1 once the log says so: exit status."""
    until(lambda: said in log.read_text(), 120, what=said)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    return process.wait(60)


def asked(hub: socket.socket, process: subprocess.Popen[bytes], log: Path) -> socket.socket | None:
    """The connection of a request to the hub, or None while there is none. AssertionError if the server has ended."""
    try:
        return hub.accept()[0]
    except TimeoutError:
        assert process.poll() is None, log.read_text()
        return None


def test_it_can_be_stopped_while_a_model_is_fetched(in_namespace: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as hub:  # which never responds
        hub.settimeout(1)
        own = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        direct = {"HF_HUB_OFFLINE": "0", "NO_PROXY": "*", "no_proxy": "*"}
        with process_1(in_namespace, log, "some/model", **own, **direct) as process:
            connection = until(lambda: asked(hub, process, log), 120, what="a request for the model")
            status = stop(process, log, "embert   ")
            assert connection is not None
            connection.close()
    assert status == 0


def test_it_drains(in_namespace: list[str], tmp_path: Path) -> None:
    with process_1(in_namespace, tmp_path / "log", *STAND_IN) as process:
        status = stop(process, tmp_path / "log", "ready    ")
    assert status == 0
