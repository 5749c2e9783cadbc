"""A task of an HTTP process that fails is logged and ends the process. None fails in silence."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.server.connections import one_to_each
from tests.server.live import ROOT, STAND_IN, live, until

GOOD = [101, 7592, 102]


SPOIL = """
import signal

def spoil(number, frame):
    from embert.server.engine_client.connection import EngineConnection
    def boom(*arguments):
        raise RuntimeError("spoilt")
    EngineConnection.connect = boom

signal.signal(signal.SIGUSR2, spoil)
"""


def test_a_process_whose_sweep_fails_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SPOIL)
    paths = os.pathsep.join(filter(None, [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH")]))
    with live(*STAND_IN, "--workers", "2", env={"PYTHONPATH": paths}, clean_log=False) as server:
        server.wait_announced()
        with one_to_each(server) as connections:
            old = list(connections)
        for pid in old:
            os.kill(pid, signal.SIGUSR2)
        until(lambda: len(server.http_pids) == 2 and not set(old) & set(server.http_pids), what="other HTTP processes")
        server.wait_ready()
        assert server.post("/embed", {"inputs": [GOOD]}).status_code == 200
        assert server.log.count("RuntimeError: spoilt") == 2
        assert server.log.count("ended with status 70; restarting") == 2
