"""Keys that change, TLS, and texts and keys that no log, metric or error may show."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from embert.engine import Encoder, PackedBatch
from embert.engine.errors import EncoderError
from embert.engine.model import Model
from embert.server.config import ConfigError, ServeConfig, read_api_keys
from embert.server.config.options import KEY_FILE_LIMIT
from embert.server.frontend.path_lookup import error_formats_by_path, keyless_paths, labels_by_path
from embert.server.http.auth import Keys
from embert.server.http.errors import Unauthorized
from embert.server.http.held_bytes import HeldBytes
from embert.server.http.middleware import RequestMetricsMiddleware
from embert.server.observability.api_metrics import ApiMetrics
from embert.server.observability.latency_buckets import LatencyBuckets
from tests.server.live import STAND_IN, Live, live, until
from tests.server.stand_in import StandIn

MARKER = "xyzzy-7f3a-marker"


# --- keys ---


def asks(keys: Keys, key: str, path: str = "/embed", method: str = "POST") -> bool:
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    try:
        keys.check({"path": path, "method": method, "headers": headers})
    except Unauthorized:
        return False
    return True


def test_a_key_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys"
    file.write_text("first\n")
    keys = Keys(ServeConfig(api_key=("fixed",), api_key_file=str(file)))
    assert [asks(keys, key) for key in ("fixed", "first", "second")] == [True, True, False]

    (tmp_path / "new").write_text("first\nsecond\n")
    (tmp_path / "new").replace(file)  # as Kubernetes does it
    keys.refresh()
    assert [asks(keys, key) for key in ("fixed", "first", "second")] == [True, True, True]

    file.write_text("# the first has gone\nsecond\n")
    keys.refresh()
    assert [asks(keys, key) for key in ("fixed", "first", "second")] == [True, False, True]
    assert "keys accepted now: 2" in caplog.text

    for spoil in (lambda: file.write_text("# none\n"), file.unlink):
        spoil()
        keys.refresh()
        keys.refresh()
        assert [asks(keys, key) for key in ("fixed", "second", "")] == [True, True, False]
    assert caplog.text.count("the keys stay as they were") == 2
    for key in ("first", "second"):
        assert f" {key}" not in caplog.text.replace("the first has", "")


def test_comments_and_marks_in_a_key_file_are_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\ufefffirst\n\t # the second\n  second  \n\n#third\n", encoding="utf-8")
    keys = Keys(ServeConfig(api_key_file=str(file)))
    assert [asks(keys, key) for key in ("first", "second")] == [True, True]
    assert not any(asks(keys, key) for key in ("# the second", "#third", "third", "\ufefffirst"))
    assert len(read_api_keys(ServeConfig(api_key_file=str(file)))) == 2


def test_a_key_may_hold_any_characters_that_a_header_can_carry(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    odd = ["foo\x85long", "a\u2028b", "\u2028c\u2029", "a b", "\xa0d\xa0", "é🔑", "#" + "x"]
    file.write_bytes("\r\n".join(odd).encode() + b"\r\n\t last \t")
    keys = Keys(ServeConfig(api_key=("  option\n",), api_key_file=str(file)))
    assert [asks(keys, key) for key in (*odd, "last", "option")] == [True] * (len(odd) - 1) + [False, True, True]
    assert not any(asks(keys, key) for key in ("foo", "long", "a", "b", "c", "d"))


@pytest.mark.parametrize("control", ["\x00", "\x0b", "\x0c", "\r", "\x1c", "\x7f"])
def test_keys_that_no_header_can_carry(tmp_path: Path, control: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(f"first\ns3cret{control}s3cret\n".encode())
    with pytest.raises(ConfigError, match=r"line 2 .*control character") as error:
        read_api_keys(ServeConfig(api_key_file=str(file)))
    assert "s3cret" not in str(error.value)
    with pytest.raises(ConfigError, match=r"--api-key number 2 .*control character"):
        read_api_keys(ServeConfig(api_key=("first", f"a{control}b")))


def test_a_key_file_that_is_no_regular_file_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Opening a FIFO waits for a writer, and a device may never end."""
    fifo = tmp_path / "keys"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match=r"regular file|directory"):
            read_api_keys(ServeConfig(api_key_file=str(path)))
    fifo.unlink()
    fifo.write_text("k\n")
    keys = Keys(ServeConfig(api_key_file=str(fifo)))
    fifo.unlink()
    os.mkfifo(fifo)
    keys.refresh()
    assert asks(keys, "k")
    assert "regular file" in caplog.text
    fifo.unlink()
    with fifo.open("wb") as file:
        file.truncate(KEY_FILE_LIMIT + 1)
    with pytest.raises(ConfigError, match=str(KEY_FILE_LIMIT)):
        read_api_keys(ServeConfig(api_key_file=str(fifo)))


def test_a_running_server_takes_new_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    with live(*STAND_IN, "--api-key-file", str(file), "--workers", "2") as server:

        def status(key: str) -> int:
            return server.post("/embed", {"inputs": "a"}, headers={"authorization": f"Bearer {key}"}).status_code

        assert (status("old"), status("new")) == (200, 401)
        file.write_text("new\n")
        until(lambda: all(status("new") == 200 for _ in range(6)), what="the new key, in both processes")
        until(lambda: all(status("old") == 401 for _ in range(6)), what="the end of the old key")
        assert "keys accepted now: 1" in server.log


@pytest.mark.parametrize(
    ("keyless", "wanted"),
    [
        (("probes", "page"), {"/": True, "/health": True, "/livez": True, "/metrics": False, "/docs": False}),
        (("probes",), {"/": False, "/health": True, "/livez": True, "/metrics": False, "/docs": False, "/info": False}),
        (("none",), {"/health": False, "/livez": False, "/metrics": False, "/docs": False, "/info": False}),
        (("metrics",), {"/": False, "/health": True, "/readyz": True, "/metrics": True, "/docs": False}),
        (("probes", "docs"), {"/readyz": True, "/metrics": False, "/docs": True, "/openapi.json": True}),
    ],
)
def test_which_routes_need_no_key(keyless: tuple[str, ...], wanted: dict[str, bool]) -> None:
    config = ServeConfig(api_key=("k",), keyless=keyless)
    keys = Keys(config, keyless_paths(config.keyless_groups))
    for path, open_ in wanted.items():
        assert asks(keys, "", path, "GET") is open_, path
        assert not asks(keys, "", path, "POST")
        assert asks(keys, "k", path, "GET")


def test_the_page_of_documentation_is_whole_without_a_key() -> None:
    options = ("--api-key", "k", "--keyless", "docs", "--keyless", "metrics")
    with live(*STAND_IN, *options, ready=False) as server:
        until(lambda: server.get("/readyz").status_code == 200, what="readiness")
        open_ = {"/docs", "/openapi.json", "/metrics", "/static-offline-docs/swagger-ui-bundle.js"}
        assert {path: server.get(path).status_code for path in open_} == dict.fromkeys(open_, 200)
        assert server.get("/info").status_code == 401


# --- TLS ---


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem signs server.pem (its key encrypted with `s3cret`) and client.pem; stranger.pem signs itself."""
    folder = tmp_path_factory.mktemp("tls")

    def make(name: str, *extra: str) -> None:
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-subj", f"/CN={name}"]
        command += [
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
            *(extra if "-passout" in extra else ("-nodes", *extra)),
        ]
        subprocess.run(command, cwd=folder, capture_output=True, check=True)

    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
    make("ca", "-addext", "keyUsage=keyCertSign,cRLSign")
    make("server", *signed, "-addext", "subjectAltName=IP:127.0.0.1", "-passout", "pass:s3cret")
    make("client", *signed)
    make("stranger")
    return folder


@pytest.fixture(scope="module")
def tls(certificates: Path) -> Iterator[Live]:
    options = ["--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key", "--ssl-ca-certs", "ca.pem"]
    options = [str(certificates / word) if "." in word else word for word in options]
    env = {"EMBERT_SSL_KEYFILE_PASSWORD": "s3cret"}
    with live(*STAND_IN, *options, "--ssl-cert-reqs", "2", env=env, ready=False) as server:
        with _client(server, certificates, "client") as client:
            until(lambda: _status(client) == 200, what="readiness over TLS")
        yield server


def _client(server: Live, certificates: Path, name: str | None) -> httpx.Client:
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    if name is not None:
        context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
    return httpx.Client(base_url=server.url, verify=context)


def _status(client: httpx.Client) -> int:
    try:
        return client.get("/readyz").status_code
    except httpx.TransportError:
        return 0


def test_a_client_with_a_certificate_gets_in(tls: Live, certificates: Path) -> None:
    with _client(tls, certificates, "client") as client:
        assert client.post("/embed", json={"inputs": "a"}).status_code == 200
    for other in (None, "stranger"):
        with _client(tls, certificates, other) as client, pytest.raises(httpx.TransportError):
            client.post("/embed", json={"inputs": "a"})


def test_old_protocols_are_off(tls: Live, certificates: Path) -> None:
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    context.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", tls.ports[0])) as plain, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(plain, server_hostname="127.0.0.1")


# --- nobody's text ---


class Touchy(StandIn):
    """Fails on long texts: with an error, with a bug, or for good."""

    def wait(self, ticket: Any) -> Any:
        batch: PackedBatch = ticket
        longest = int(max(batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]))
        if longest > 200:
            os._exit(139)
        if longest > 150:
            raise RuntimeError("a bug")
        if longest > 100:
            raise EncoderError("an error")
        return super().wait(batch)


def create(model: Model, *, device: str, dtype: str, max_batch_tokens: int | None) -> Encoder:
    return Touchy(model, device=device, dtype=dtype, max_batch_tokens=max_batch_tokens)


def test_no_text_in_logs_and_errors() -> None:
    options = ["--encoder", f"{__name__}:create", "--log-level", "debug", "--header-limit", "2000"]
    options += ["--max-client-batch-size", "4", "--max-client-batch-tokens", "600", "--payload-limit", "20000"]
    with live(*options, clean_log=False) as server:
        answers = [
            *(server.post("/embed", body) for body in _bodies()),
            *(server.post("/v1/embeddings", {"input": text}) for text in (MARKER, [MARKER, 5], {MARKER: MARKER})),
            server.post("/v1/embeddings", {"input": "a", "model": f"{MARKER} {MARKER}" * 5}),
            server.post("/embed_all", {"inputs": MARKER}),
            server.post("/similarity", {"inputs": {"source_sentence": MARKER, "sentences": [MARKER, 7]}}),
            server.post("/embed", {}, headers={"x-filler": MARKER * 200}),
            _raw(server, _too_late()),
            _raw(server, f"{MARKER} / HTTP/1.1\r\n\r\n".encode()),
            _raw(
                server,
                b"POST /embed HTTP/1.1\r\nconnection: close\r\ncontent-length: 40\r\n\r\n"
                + f'{{"inputs": "{MARKER}'.encode()
                + b"\xff" * 11,
            ),
        ]
        for words in (110, 160, 210):
            server.wait_ready()
            failed = server.post("/embed", {"inputs": f"{MARKER} " + "word " * words})
            assert failed.status_code == 424
            answers.append(failed)
        seen = {answer.status_code for answer in answers}
        assert seen >= {200, 400, 413, 422, 424, 431, 503}
        nowhere = server.post(f"/{MARKER}", {})  # a 404 names the path that was asked for
        assert nowhere.status_code == 404
        assert MARKER not in str(nowhere.headers)
        for answer in answers:
            assert MARKER not in answer.text, answer.text
            assert MARKER not in str(answer.headers)
        server.wait_ready()
        assert MARKER not in server.get("/metrics").text
        assert "an error" in server.log  # the log tells of it, without the text
        assert MARKER not in server.log


def _bodies() -> Iterator[Any]:
    yield {"inputs": MARKER}
    yield {"inputs": [MARKER, ""]}
    yield {"inputs": [MARKER] * 5}
    yield {"inputs": [f"{MARKER} " + "word " * 90] * 4}
    yield {"inputs": [f"{MARKER} " + "word " * 240] * 4}
    yield {"inputs": MARKER * 2000}
    yield {"inputs": MARKER * 200, "truncate": False}
    yield {"inputs": [MARKER, 1]}
    yield {"inputs": {"text": MARKER}}
    yield {"inputs": MARKER, "prompt_name": f"{MARKER}\n"}
    yield {"inputs": MARKER, "truncation_direction": MARKER}
    yield {"inputs": MARKER, "dimensions": MARKER}
    yield {MARKER: MARKER}
    yield MARKER
    yield [MARKER]


def _too_late() -> bytes:
    """A request that is out of time when it is read: head and body are one packet, so the server need not wait."""
    body = f'{{"inputs": "{MARKER}"}}'
    return (
        f"POST /embed HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx-request-timeout: 0.000001\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()


def _raw(server: Live, data: bytes) -> httpx.Response:
    with socket.create_connection(("127.0.0.1", server.ports[0]), 10) as connection:
        connection.sendall(data)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    return httpx.Response(int(head.split()[1]), content=body)


def test_a_bug_of_ours_is_logged_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError(MARKER)

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    metrics = ApiMetrics(("other",), LatencyBuckets())
    middleware = RequestMetricsMiddleware(app, labels_by_path(), (), error_formats_by_path(), metrics, HeldBytes(1))
    asyncio.run(middleware({"type": "http", "method": "POST", "path": "/x", "headers": []}, receive, send))
    assert sent[0]["status"] == 500
    assert json.loads(sent[1]["body"])["error"] == "internal error; the log has more"
    assert "ValueError" in caplog.text
    assert "test_secrets.py" in caplog.text
    assert MARKER not in caplog.text
