"""Starts that cannot succeed: one sentence on stderr, the right exit status, and no traceback."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from embert.server.cli.main import main
from embert.server.config import ConfigError
from embert.server.supervisor.sockets import listen
from tests.server.live import EMBERT, ROOT, STAND_IN, environment, run_cli


def refused(*options: str, env: dict[str, str] | None = None) -> str:
    """The one sentence that a start which fails leaves on stderr."""
    ended = run_cli("serve", "--host", "127.0.0.1", "--port", "0", *options, env=env)
    assert (ended.returncode, ended.stdout) == (1, "")
    return complaint(ended.stderr)


def complaint(stderr: str) -> str:
    assert "Traceback" not in stderr
    complaints = [line for line in stderr.splitlines() if any(word in line for word in ("ERROR", "error:", "CRITICAL"))]
    assert len(complaints) == 1, stderr
    return complaints[0]


def wrong(*options: str, env: dict[str, str] | None = None) -> str:
    """Like `refused`, in this process: wrong options are found before anything starts."""
    err = io.StringIO()
    opened: list[socket.socket] = []

    def listening(*arguments: Any) -> list[socket.socket]:
        sockets = listen(*arguments)
        opened.extend(sockets)
        return sockets

    with (
        mock.patch.dict(os.environ, environment(env), clear=True),
        mock.patch("embert.server.cli.serve.configure_logging"),
        mock.patch("embert.server.cli.serve.listen", listening),
        mock.patch("signal.signal"),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main(("serve", "--host", "127.0.0.1", "--port", "0", *options))
    for sock in opened:
        sock.close()
    assert ended.value.code == 2
    return complaint(err.getvalue())


# --- models ---


def test_no_such_model(tmp_path: Path) -> None:
    assert str(tmp_path / "nothing") in refused(str(tmp_path / "nothing"), env={"HF_HUB_OFFLINE": "1"})


# --- the encoder, whose errors arise in its own process ---


@pytest.mark.parametrize(
    ("way", "said"),
    [("memory", "not enough memory"), ("missing", "weights vanished")],
)
def test_an_encoder_that_does_not_load(way: str, said: str, tmp_path: Path) -> None:
    """Neither processes nor temporary folders are left behind."""
    assert said in refused(*STAND_IN, env={"STAND_IN_LOAD": way, "TMPDIR": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_devices_that_are_not_there() -> None:
    assert "cuda" in refused("--device", "cuda:97,98")


# --- options ---


@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
def test_a_port_in_use_is_named_with_its_option(option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = wrong(option, str(port))
    assert str(port) in said
    assert "in use" in said
    assert option in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--host", "no.such.host.invalid"), ("--host", "no.such.host.invalid")),
        (("--host", "192.0.2.1"), ("192.0.2.1",)),
        (("--max-batch-tokens", "100"), ("--max-batch-tokens", "100", "256")),
        (("--default-prompt-name", "query"), ("--default-prompt-name", "'query'", "none")),
        (("--api-key-file", "/nonexistent/keys"), ("--api-key-file", "/nonexistent/keys")),
        (("--ssl-keyfile", "/nonexistent", "--ssl-certfile", "/nonexistent"), ("--ssl-certfile", "/nonexistent")),
        (("--workers", "-1"), ("--workers", "0 to 256", "-1")),
        (("--request-timeout", "nan"), ("--request-timeout", "nan")),
        (("--default-prompt", "a", "--default-prompt-name", "b"), ("--default-prompt", "--default-prompt-name")),
        (("--not-an-option",), ("--not-an-option",)),
        (("a=x", "a=y"), ("2 models", "'a'", "NAME=MODEL")),
        (("x", "x"), ("2 models", "'x'", "NAME=MODEL")),
        (("x", "y", "--revision", "main"), ("--revision", "NAME=MODEL", "--config")),
        (("x", "y", "--served-model-name", "z"), ("--served-model-name", "NAME=MODEL")),
        (("a=x", "--served-model-name", "z"), ("--served-model-name", "'a=x'")),
        (("a b=x",), ("'a b'", "paths")),
        (("x", "--config", "/nonexistent.toml"), ("--config /nonexistent.toml", "'x'")),
        (("--config", "/nonexistent.toml"), ("--config /nonexistent.toml", "cannot be read", "No such file")),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)
def test_options_that_cannot_be(options: tuple[str, ...], said: tuple[str, ...]) -> None:
    sentence = wrong(*options)
    for piece in said:
        assert piece in sentence


def test_a_key_file_without_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# nobody\n\n")
    assert "holds no key" in wrong("--api-key-file", str(keys))


def test_environment_variables_are_named_in_errors() -> None:
    assert "EMBERT_WORKERS" in wrong(env={"EMBERT_WORKERS": "many"})
    said = wrong(env={"EMBERT_AUTO_TRUNCATE": "maybe"})
    assert "EMBERT_AUTO_TRUNCATE" in said
    assert "'maybe'" in said


@pytest.mark.parametrize(
    ("limit", "status", "says"),
    [
        ("-f 0", 1, ("cannot allocate shared memory",)),  # no file may hold a byte
        ("-n 64", 2, ("64 files", "at least 136")),
    ],
)
def test_limits_of_the_system_that_are_too_low(limit: str, status: int, says: tuple[str, ...]) -> None:
    command = [*EMBERT, "serve", "--host", "127.0.0.1", "--port", "0", "--workers", "2", *STAND_IN]
    ended = subprocess.run(
        ["/bin/sh", "-c", f'ulimit {limit} && exec "$@"', "sh", *command],
        cwd=ROOT,
        env={name: value for name, value in environment().items() if not name.startswith("COVERAGE_")},  # writes files
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == status
    assert "Traceback" not in ended.stderr
    assert all(value in ended.stderr.splitlines()[-1] for value in says)


def test_all_addresses_of_ipv6_are_those_of_ipv4_too() -> None:
    (sock,) = listen("::", 0)
    port = sock.getsockname()[1]
    for address in ("::1", "127.0.0.1"):
        socket.create_connection((address, port), 60).close()
    sock.close()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="--port"):
        listen("::", taken.getsockname()[1])
