"""TLS: the bytes that it carries, connections before their handshake, responses that nobody reads, and certificates."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from embert.server.config import ServeConfig
from embert.server.http.connections import unread_bytes
from embert.server.http.protocol import HEAD_TIMEOUT_S
from embert.server.http.tls import Certificates
from tests.server.connections import LINGERS
from tests.server.http.echo_server import GET, GET_LARGE, LARGE, Serving, chunked, post, scene, skip, wait_until
from tests.server.live import STAND_IN, Live, live, until

Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem signs server.pem and client.pem; stranger.pem signs itself."""
    folder = tmp_path_factory.mktemp("tls")

    def make(name: str, *options: str) -> None:
        command = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -days 2 -subj /CN={name}".split()
        command += ["-keyout", f"{name}.key", "-out", f"{name}.pem", *options]
        subprocess.run(command, cwd=folder, capture_output=True, check=True)

    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
    make("ca", "-nodes", "-addext", "keyUsage=keyCertSign,cRLSign")
    make("server", *signed, "-addext", "subjectAltName=IP:127.0.0.1", "-nodes")
    make("client", "-nodes", *signed)
    make("stranger", "-nodes")
    return folder


@pytest.fixture(scope="module")
def tls(certificates: Path) -> Contexts:
    """Contexts of a server, and of clients that trust it."""
    server, clients = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    clients.check_hostname = False
    clients.load_verify_locations(certificates / "ca.pem")
    return server, clients


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
@scene()
async def test_requests_over_tls(server: Serving, tls: Contexts, version: ssl.TLSVersion) -> None:
    clients = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    clients.check_hostname, clients.verify_mode = False, ssl.CERT_NONE
    clients.minimum_version = clients.maximum_version = version
    server.trust = clients
    client = await server.connect()
    body = LARGE[:3_000_000]
    await client.send(post(body), post(b"b"), chunked(b"c", b"d"), GET_LARGE)
    bodies = [(await client.response()).body for _ in range(4)]
    assert bodies == [b"/echo " + body, b"/echo b", b"/echo cd", LARGE]
    response = await client.ask(post(b"", "/echo", b"connection: close"))
    assert response.closes
    assert await client.rest() == []


@scene(served=3, surplus=1)
async def test_connections_count_before_their_handshake(server: Serving, tls: Contexts) -> None:
    silent = [await server.connect(plain=True) for _ in range(3)]
    await server.count(3)
    for _ in range(3):  # each takes the place of the one that has been silent for longest
        assert await (await server.connect()).is_open()
        assert len(server.connections) == 3
    assert all([await each.reader.read() == b"" for each in silent])


@scene()
async def test_a_handshake_has_its_time(server: Serving, tls: Contexts) -> None:
    silent = await server.connect(plain=True)
    await server.count(1)
    await silent.send(b"\x16\x03\x01\x02\x00\x01")  # a record that does not end
    await skip(HEAD_TIMEOUT_S / 2)
    assert len(server.connections) == 1
    await skip(HEAD_TIMEOUT_S)
    await server.count(0)


@scene()
async def test_plain_http_is_closed(server: Serving, tls: Contexts) -> None:
    client = await server.connect(plain=True)
    await client.send(GET)
    assert not (await client.reader.read()).startswith(b"HTTP")
    await server.count(0)
    assert not server.asked


@scene()
async def test_a_response_is_encrypted_as_its_client_reads(server: Serving, tls: Contexts) -> None:
    client = await server.connect()
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await client.send(GET_LARGE + GET)
    (connection,) = server.connections
    await wait_until(lambda: unread_bytes(connection))
    raw = connection.transport.transport  # type: ignore[attr-defined]
    assert raw.get_write_buffer_size() < 200_000
    assert len(LARGE) > connection.transport.get_write_buffer_size() > len(LARGE) // 8
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    assert (await client.response()).body == LARGE
    assert (await client.response()).status == 200
    assert unread_bytes(connection) == 0


# --- a server with certificates of clients ---


def trust(certificates: Path, name: str | None) -> ssl.SSLContext:
    """The context of a client with the certificate of this name."""
    context = ssl.create_default_context(cafile=certificates / "ca.pem")
    if name is not None:
        context.load_cert_chain(certificates / f"{name}.pem", certificates / f"{name}.key")
    return context


@pytest.fixture(scope="module")
def secure(certificates: Path) -> Iterator[Live]:
    files = {"--ssl-certfile": "server.pem", "--ssl-keyfile": "server.key", "--ssl-ca-certs": "ca.pem"}
    options = [word for option, name in files.items() for word in (option, str(certificates / name))]
    with live(*STAND_IN, *options, "--metrics-port", "0", ready=False, constants=LINGERS) as server:
        server.wait_announced()
        yield server


def test_a_client_needs_a_certificate(secure: Live, certificates: Path) -> None:
    with secure.client(verify=trust(certificates, "client")) as client:
        assert client.post("/embed", json={"inputs": "a"}).status_code == 200
    for other in (None, "stranger"):
        with secure.client(verify=trust(certificates, other)) as client, pytest.raises(httpx.TransportError):
            client.post("/embed", json={"inputs": "a"})
    with pytest.raises(httpx.TransportError):
        secure.get(f"http://127.0.0.1:{secure.ports[0]}/livez")
    assert secure.get(f"{secure.metrics_url}/metrics").status_code == 200  # inside the cluster, plain
    assert "https://127.0.0.1" in secure.log


def test_certificates_are_read_again_on_sighup(secure: Live, certificates: Path) -> None:
    def certificate() -> bytes | None:
        context = trust(certificates, "client")
        context.check_hostname = False
        with (
            socket.create_connection(("127.0.0.1", secure.ports[0])) as plain,
            context.wrap_socket(plain) as connection,
        ):
            return connection.getpeercert(binary_form=True)

    def replace_with(name: str) -> None:
        for kind in ("pem", "key"):
            shutil.copy(certificates / f"{name}.{kind}", certificates / f"new.{kind}")
            (certificates / f"new.{kind}").replace(certificates / f"server.{kind}")
        secure.signal(signal.SIGHUP)

    before = certificate()
    for kind in ("pem", "key"):
        shutil.copy(certificates / f"server.{kind}", certificates / f"before.{kind}")
    replace_with("client")
    until(lambda: certificate() != before, what="the new certificate")
    replace_with("before")
    until(lambda: certificate() == before, what="the certificate of before")
    with secure.client(verify=trust(certificates, "client")) as client:
        assert client.post("/embed", json={"inputs": "a"}).status_code == 200


def test_files_that_cannot_be_used_leave_the_certificates(
    certificates: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "both.pem"
    file.write_bytes((certificates / "client.pem").read_bytes() + (certificates / "client.key").read_bytes())
    files = Certificates(ServeConfig(ssl_certfile=str(file)))
    before = files.current()
    file.write_bytes((certificates / "client.pem").read_bytes() + (certificates / "stranger.key").read_bytes())
    files.refresh()
    assert files.current() is before
    assert f"--ssl-certfile {file}" in caplog.text


def test_old_protocols_are_off(secure: Live, certificates: Path) -> None:
    context = trust(certificates, "client")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    address = ("127.0.0.1", secure.ports[0])
    with socket.create_connection(address) as plain, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(plain, server_hostname="127.0.0.1")
