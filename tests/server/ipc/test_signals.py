"""SIGHUP, of a person and of a terminal that has been closed, and signals that would end a process by default."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.server.live import ROOT

CODE = """
import signal
from embert.server.ipc.signals import handle_signals
handle_signals(lambda number: print("end", number, flush=True), lambda: print("reload", flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""


@contextmanager
def process(
    terminal: int | None = None, *, nohup: bool = False
) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """A process with these handlers in a new session, and the lines that it has written."""

    def begin() -> None:
        if terminal is not None:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)

    with subprocess.Popen(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        pass_fds=[] if terminal is None else [terminal],
        preexec_fn=begin,
    ) as running:
        assert running.stdout is not None
        lines = iter(running.stdout.readline, "")
        try:
            assert next(lines) == "ready\n"
            yield running, lines
        finally:
            running.kill()


@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_ends_what_it_has_started(nohup: bool) -> None:
    terminal, end = pty.openpty()
    with process(end, nohup=nohup) as (running, lines):
        os.close(end)
        running.send_signal(signal.SIGHUP)
        assert next(lines) == "reload\n"
        os.close(terminal)
        assert next(lines) == ("reload\n" if nohup else "end 1\n")
