"""`embert embed` with the stand-in encoder and small blocks: to its end, or stopped on the way."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from embert.server.cli.main import main
from tests.server.bulk.forks import Fork
from tests.server.live import ROOT, STAND_IN, environment

BLOCK = 256  # texts of a block, so that a few blocks take no time
_LIMIT = "embert.server.bulk.job.BLOCK_TEXTS"
_FORKS = SimpleNamespace(Popen=Fork, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
_PROGRAM = f"""
import embert.server.bulk.job as job
from embert.server.cli.main import main
job.BLOCK_TEXTS = {BLOCK}
main()
"""
COMMAND = (sys.executable, "-P", "-c", _PROGRAM, "embed", "-q", *STAND_IN)


def embedded(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A run until its end; the command itself runs in this process, and its workers are forked."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch(_LIMIT, BLOCK),
        mock.patch("embert.server.bulk.worker.subprocess", _FORKS),
        pytest.raises(SystemExit) as ended,
    ):
        main(("embed", "-q", *map(str, arguments), *STAND_IN))
    out.seek(0)
    return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), out.read(), err.getvalue())


def embed(*arguments: str | Path) -> str:
    """A run that succeeds: its standard output."""
    ended = embedded(*arguments)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@contextlib.contextmanager
def started(arguments: Sequence[str | Path], extra: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A run that goes on, with some of the stand-in's orders in its environment; ended with the context."""
    with subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        cwd=ROOT,
        env=environment(extra),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def fed(
    texts: Path, lines: int, arguments: Sequence[str | Path], extra: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A run that has read the first lines of `texts` from standard input and waits for the others, which come too.

    It stays in this state, however long a test takes to kill it. `process.communicate` sends it more lines.
    """
    every = texts.read_text().splitlines(keepends=True)
    with started(["-f", "-", *arguments], extra) as process:
        assert process.stdin is not None
        process.stdin.writelines(every[:lines])
        process.stdin.flush()
        yield process, "".join(every[lines:])
