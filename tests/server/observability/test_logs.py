"""Log lines, each test in another process, because logging is configured for a whole process."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys

import pytest

from tests.server.live import ROOT, environment

PROGRAM = """
import logging, sys
from embert.server.observability.logs import configure_logging
configure_logging("http-0", sys.argv[1], sys.argv[2])
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


MANY = """
import logging, sys
from embert.server.observability.logs import configure_logging
configure_logging("http-0", "json", "info")
for number in range(int(sys.argv[1])):
    logging.info("line %d of many: %s", number, "x" * (number % 300))
print("done", flush=True)
sys.stdin.read()
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
    assert all(line["process"] == "http-0" and line["pid"] > 0 for line in found)
    assert found[1]["request_id"] == "r-1"
    assert found[2]["exception"].endswith("ValueError: broken\nin two")


def test_text() -> None:
    found = lines("text", "info")
    assert found[0].endswith("INFO    http-0     found 2 things: ünïcode")
    assert found[0][2] == found[0][5] == ":"
    assert found[-1] == "in two"
    assert not any("debug" in line or "not ours" in line for line in found)


def test_levels() -> None:
    assert "a debug" in [json.loads(line)["message"] for line in lines("json", "debug")]
    assert [json.loads(line)["message"] for line in lines("json", "error")] == ["it failed"]


def test_a_full_disk_or_a_reader_that_has_left_costs_lines_and_nothing_else() -> None:
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "w") as full, os.fdopen(write, "w") as pipe:  # noqa: PTH123 - a device
        for stderr in (full, pipe):
            assert lines("json", "debug", stderr.fileno()) == []


@pytest.mark.parametrize(("kind", "count"), [("pipe", 3000), ("socket", 3000), ("terminal", 3000), ("pipe", 30_000)])
def test_a_log_that_nobody_reads_holds_up_nobody_and_comes_when_somebody_does(kind: str, count: int) -> None:
    """3 000 lines are more than a pipe or a socket takes. 30 000 are more than is kept: whoever reads is told."""
    if kind == "socket":
        ours, theirs = (end.detach() for end in socket.socketpair())
    else:
        ours, theirs = pty.openpty() if kind == "terminal" else os.pipe()
    of_others = os.dup(theirs)
    with subprocess.Popen(
        [sys.executable, "-c", MANY, str(count)],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"  # though not a line has been read
        found = _read(ours, count)
        process.communicate()
    assert os.get_blocking(of_others), "who else writes there waits for the reader, as it expects"
    os.close(of_others)
    os.close(ours)
    lost = [int(message.split()[0]) for message in found if "are lost" in message]
    numbers = [int(message.split()[1]) for message in found if "are lost" not in message]
    assert numbers == sorted(set(numbers))
    assert len(numbers) + sum(lost) == count
    assert bool(lost) is (count > 3000)


def _read(fd: int, count: int) -> list[str]:
    """Messages, until there are `count` lines of them, those told as lost included."""
    read = b""
    while True:
        messages = [json.loads(line)["message"] for line in read[: read.rfind(b"\n") + 1].splitlines()]
        lost = sum(int(message.split()[0]) - 1 for message in messages if "are lost" in message)
        if len(messages) + lost >= count:
            return messages
        piece = os.read(fd, 1 << 20)
        assert piece, "the process has ended"
        read += piece
