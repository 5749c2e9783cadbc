"""Log lines, in a process of their own since they are the whole process's."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.server.live import ROOT, environment

PROGRAM = """
import logging, sys
from server.logs import configure_logging
configure_logging("api-0", sys.argv[1], sys.argv[2])
log = logging.getLogger("server.x")
log.debug("a %s", "debug")
log.info("found %d things: %s", 2, "ünïcode")
log.info("with more", extra={"request_id": "r-1", "object": object})
logging.getLogger("uvicorn.error").info("not ours")
try:
    raise ValueError("broken\\nin two")
except ValueError:
    log.exception("it failed")
log.info("wrong %d", "format")
print("still running")
"""


def lines(log_format: str, log_level: str, stderr: int = subprocess.PIPE) -> list[str]:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, log_format, log_level],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=True,
    )
    assert ended.stdout == "still running\n"
    return (ended.stderr or "").splitlines()


def test_json() -> None:
    found = [json.loads(line) for line in lines("json", "info")]
    assert [line["message"] for line in found] == ["found 2 things: ünïcode", "with more", "it failed"]
    assert {line["level"] for line in found} == {"info", "error"}
    assert all(line["process"] == "api-0" and line["pid"] > 0 for line in found)
    assert found[1]["request_id"] == "r-1"
    assert found[2]["exception"].endswith("ValueError: broken\nin two")


def test_text() -> None:
    found = lines("text", "info")
    assert found[0].endswith("INFO    api-0      found 2 things: ünïcode")
    assert found[0][2] == found[0][5] == ":"
    assert found[-1] == "in two"
    assert not any("debug" in line or "not ours" in line for line in found)


def test_levels() -> None:
    assert "a debug" in [json.loads(line)["message"] for line in lines("json", "debug")]
    assert [json.loads(line)["message"] for line in lines("json", "error")] == ["it failed"]


def test_a_full_disk_costs_lines_and_nothing_else() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        assert lines("json", "debug", full.fileno()) == []
