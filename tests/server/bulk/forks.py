"""Forks the workers of a run from a process that has imported their modules, because imports take seconds."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["embert.server.bulk.worker", "tests.server.bulk.forks", "tests.server.stand_in"])
_LARGE = 512  # above the numbers of descriptors that a worker gets


class _Descriptors:
    """Descriptors that a process has under the numbers that they have in its parent."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers

    def __getstate__(self) -> Any:
        return [(number, DupFd(number)) for number in self._numbers]

    def __setstate__(self, state: Any) -> None:
        self._received = [(number, fcntl.fcntl(each.detach(), fcntl.F_DUPFD, _LARGE)) for number, each in state]

    def take(self) -> None:
        for number, received in self._received:
            os.dup2(received, number)
            os.close(received)


class Fork:
    """Stands in for subprocess.Popen of a worker."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any) -> None:
        self._process = _FORKS.Process(target=_work, args=(command[-1], _Descriptors(pass_fds), dict(env)))
        self._process.start()
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("worker", timeout)
        return self._process.exitcode


def _work(connection: str, descriptors: _Descriptors, environment: dict[str, str]) -> None:
    from embert.server.bulk import worker

    descriptors.take()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = [connection]
    worker.main()
