"""`embert serve` as process 1, for which the kernel ignores every signal that the process does not handle."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.live import ROOT, STAND_IN, environment, until

COMMAND = [sys.executable, "-m", "embert.server.commands.cli", "serve", "--host", "127.0.0.1", "--port", "0"]


@pytest.fixture
def in_namespace() -> list[str]:
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("needs root and unshare, for a namespace of processes")
    return [unshare, "--pid", "--fork", "--kill-child"]


def stop(process: subprocess.Popen[bytes], log: Path, said: str) -> int:
    """SIGTERM to process 1 once the log says so: exit status."""
    with process:
        until(lambda: said in log.read_text(), 120, what=said)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        return process.wait(60)


def test_it_can_be_stopped_while_a_model_is_fetched(in_namespace: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub, (tmp_path / "log").open("wb") as log:  # which never answers
        env = environment({"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HOME": str(tmp_path)})
        process = subprocess.Popen([*in_namespace, *COMMAND, "some/model"], cwd=ROOT, env=env, stderr=log)
        hub.accept()[0].detach()
        status = stop(process, tmp_path / "log", "embert   ")
    assert status == 128 + signal.SIGTERM


def test_it_drains(in_namespace: list[str], tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*in_namespace, *COMMAND, *STAND_IN], cwd=ROOT, env=environment(), stderr=log)
        status = stop(process, tmp_path / "log", "ready    ")
    assert status == 0
