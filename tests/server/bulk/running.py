"""`embert embed` as a process of its own, with the stand-in encoder."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.server.live import EMBERT, ROOT, STAND_IN, environment, run_cli

__all__ = ["embed", "embedded", "started"]


def embedded(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A run until its end."""
    return run_cli("embed", "-q", *map(str, arguments), *STAND_IN)


def embed(*arguments: str | Path) -> str:
    """A run that succeeds: its standard output."""
    ended = embedded(*arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@contextlib.contextmanager
def started(arguments: Sequence[str | Path], extra: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A run that goes on, with some of the stand-in's orders in its environment; ended with the context."""
    command = [*EMBERT, "embed", "-q", *map(str, arguments), *STAND_IN]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
