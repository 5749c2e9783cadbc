"""A real `embert serve`, started for a test and never left behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

ROOT = Path(__file__).parents[2]
STAND_IN = ("--encoder", "tests.server.stand_in:create")
# -P, as in the installed command: the working folder is not importable.
EMBERT = (sys.executable, "-P", "-m", "embert.server.cli.main")
START_TIMEOUT_S = 120.0
# In the environment of a stand-in that a test holds: a forward may take 30 s instead of 5 before it counts as hung.
PATIENT = {"STAND_IN_WARM_S": "0.3"}
_LABEL = re.compile(r'(\w+)="([^"]*)"')
HELD_FILE, LOAD_FILE = "held", "loading"
# httpx reads every certificate of the machine for each client, 20 ms, unless it is handed a context.
TRUST = ssl.create_default_context()

T = TypeVar("T")

MAX_WEIGHTS = "embert.server.config.options.MAX_RESPONSE_WEIGHTS"  # for `constants` of `live`


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with the repository importable, and of embert's options only `--workers 1`.

    A test that needs several HTTP processes starts its server with `--workers 2`, one that needs the default with 0.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("EMBERT_", "STAND_IN_"))}
    paths = [str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
    # What tests see must not depend on the machine: neither the length of usage lines and progress bars, nor the number
    # of HTTP processes, each of which counts and limits by itself.
    fixed = {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "100", "EMBERT_WORKERS": "1"}
    return inherited | fixed | dict(extra or {})


def until(condition: Callable[[], T], timeout_s: float = 60.0, *, what: str = "the condition") -> T:
    """Call `condition` until it is true, and return its result. AssertionError after pauses of `timeout_s` in all.

    Pauses are counted and not measured: a machine that stops for a minute takes nothing from the limit.
    """
    waited_s, pause_s = 0.0, 0.01
    while True:
        response = condition()
        if response:
            return response
        if waited_s > timeout_s:
            raise AssertionError(f"{what} did not come true within {timeout_s:g} s")
        time.sleep(pause_s)
        waited_s += pause_s
        pause_s = min(1.3 * pause_s, 0.1)  # the condition may take CPU time from the server


def free_port() -> int:
    """A port that no other process gets meanwhile: the system assigns others, to listeners and to connections."""
    first_assigned = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(first_assigned // 2, first_assigned)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Samples(dict[str, float]):
    """Samples by `name{label="value",…}`. With some labels only, or none: the sum of all that have at least these."""

    def __missing__(self, sample: str) -> float:
        name, _, labels = sample.partition("{")
        wanted = set(_LABEL.findall(labels))
        found = [
            value for each, value in self.items()
            if each.partition("{")[0] == name and wanted <= set(_LABEL.findall(each))
        ]  # fmt: skip
        if not found:
            raise KeyError(sample)
        return sum(found)

    @classmethod
    def parse(cls, text: str) -> Samples:
        """Every sample of a response to a scrape."""
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return cls((name, float(value)) for name, _, value in lines)

    def get(self, sample: str, default: float = 0.0) -> float:  # type: ignore[override]
        """Returns `self[sample]`, or the default."""
        try:
            return self[sample]
        except KeyError:
            return default


@dataclass
class Live:
    process: subprocess.Popen[bytes]
    log_path: Path
    ports: list[int] = field(default_factory=list)  # of HTTP, then of --metrics-port
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.ports[0]}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.ports[1]}"

    @contextlib.contextmanager
    def held(self) -> Iterator[Path]:
        """Keep a stand-in from ending a forward with the order HELD; the file it gives exists once one runs."""
        file, runs = self.log_path.with_name(HELD_FILE), self.log_path.with_name("runs")
        runs.unlink(missing_ok=True)
        file.touch()
        try:
            yield runs
        finally:
            file.unlink()

    def end_loading(self) -> None:
        """Let a stand-in that was started with `loading=True` end its loading."""
        self.log_path.with_name(LOAD_FILE).unlink()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def http_pids(self) -> list[int]:
        return self._pids("embert.server.frontend.process")

    @property
    def engine_pids(self) -> list[int]:
        return self._pids("embert.server.engine_worker.process")

    @property
    def pids(self) -> list[int]:
        """PIDs of all processes, the supervisor first."""
        return [self.process.pid, *self.http_pids, *self.engine_pids]

    @property
    def engine_endpoint(self) -> str:
        """The name of the first engine's socket."""
        (pid,) = self.engine_pids[:1]
        names = {str(each.laddr) for each in psutil.Process(pid).net_connections("unix")}
        (name,) = {name.removeprefix("@") for name in names if name.startswith("@embert-")}
        return name

    def _pids(self, module: str) -> list[int]:
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if module in child.cmdline():
                    found.append(child.pid)
        return found

    def client(self, **options: Any) -> httpx.Client:
        """A client of this server; close it, or use it as a context manager."""
        return httpx.Client(base_url=self.url, **{"timeout": 120.0, "verify": TRUST, **options})

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """One request over a new connection."""
        with self.client() as client:
            return client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """One request over a new connection."""
        with self.client() as client:
            return client.get(path, **options)

    def try_get(self, path: str, **options: Any) -> httpx.Response | None:
        """Returns the response, or None if the process that accepted the connection, or would, has ended."""
        with contextlib.suppress(httpx.TransportError):
            return self.get(path, **options)
        return None

    def metrics(self) -> Samples:
        """Every sample of /metrics."""
        return Samples.parse(self.get("/metrics").text)

    def is_ready(self) -> bool:
        """True if /readyz is 200. False without a response."""
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended with status {self.process.returncode}")
        response = self.try_get("/readyz")
        return response is not None and response.status_code == 200

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        until(self.is_ready, timeout_s, what="readiness")

    def wait_announced(self) -> None:
        """Wait until the log reports that every process is ready, which can be after /readyz is 200."""
        until(lambda: "ready    http" in self.log, START_TIMEOUT_S, what="the announcement")

    def kill_engine(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the only engine process, and wait until another one replaces it."""
        (pid,) = self.engine_pids
        os.kill(pid, number)
        until(lambda: self.engine_pids not in ([], [pid]), what="another engine process")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 200.0) -> int:
        """The exit status, once the server has ended."""
        return self.process.wait(timeout_s)

    def _listening(self) -> list[int]:
        """Ports the supervisor has opened, in the order in which it did."""
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended with status {self.process.returncode}")
        connections = psutil.Process(self.process.pid).net_connections("tcp")
        listening = [c for c in sorted(connections, key=lambda c: c.fd) if c.status == psutil.CONN_LISTEN]
        return list(dict.fromkeys(c.laddr.port for c in listening))  # every HTTP process has a socket of the same port


@contextlib.contextmanager
def live(
    *options: str,
    env: Mapping[str, str] | None = None,
    constants: Mapping[str, float] | None = None,
    code: str = "",
    ready: bool = True,
    loading: bool = False,
    status: int | None = 0,
    clean_log: bool = True,
    files: int | None = None,
) -> Iterator[Live]:
    """`embert serve *options` on a free port, and the end of it.

    Entered when /readyz is 200, or with `ready=False` as soon as the port is open. With `loading=True`, which is not
    waited for either, a stand-in loads until it is told to end that. Left with SIGTERM (unless the test
    has ended the server itself); the exit status must be `status` (None: any) and, with `clean_log`, the log must hold
    no traceback. `constants` of modules (`package.module.NAME`) have other values in all processes, which run `code`
    at their start. `files` is how many files each of them may open. Whatever happens, no process stays.
    """
    with tempfile.TemporaryDirectory(prefix="embert-test-") as folder:
        log_path = Path(folder, "log")
        files_of_stand_in = {
            "STAND_IN_HELD_FILE": str(log_path.with_name(HELD_FILE)),
            "STAND_IN_LOAD_FILE": str(log_path.with_name(LOAD_FILE)),
        }
        if loading:
            log_path.with_name(LOAD_FILE).touch()
        variables = environment(files_of_stand_in | dict(env or {}))
        for path, value in (constants or {}).items():
            module, _, name = path.rpartition(".")
            code += f"import {module} as module\nassert module.{name} is not None\nmodule.{name} = {value!r}\n"
        if code:
            Path(folder, "sitecustomize.py").write_text(code)
            variables["PYTHONPATH"] = os.pathsep.join((folder, variables["PYTHONPATH"]))
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*EMBERT, "serve", "--host", "127.0.0.1", "--port", "0", *options],
                cwd=ROOT,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=None
                if files is None
                else partial(resource.setrlimit, resource.RLIMIT_NOFILE, (files, files)),
            )
        server = Live(process, log_path, scheme="https" if "--ssl-certfile" in options else "http")
        family: set[psutil.Process] = set()
        try:
            wanted = 2 if "--metrics-port" in options else 1
            server.ports = until(
                lambda: found if len(found := server._listening()) >= wanted else [],
                START_TIMEOUT_S,
                what="an open port",
            )
            if ready and not loading:
                server.wait_ready()
            yield server
            family |= _family(process.pid)
            if process.poll() is None:
                process.terminate()
            ended = process.wait(240)
            assert status is None or ended == status, f"the server ended with status {ended}"
            if clean_log:
                assert "Traceback" not in server.log, "the log holds a traceback"
        except BaseException as error:
            error.add_note(f"the server's log:\n{server.log[-8000:]}")
            raise
        finally:
            family |= _family(process.pid)
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.kill()
            process.wait()


def _family(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def run_cli(
    *arguments: str, env: Mapping[str, str] | None = None, stdin: str | None = None, timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """`embert *arguments` from start to end."""
    return subprocess.run(
        [*EMBERT, *arguments],
        cwd=ROOT,
        env=environment(env),
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
