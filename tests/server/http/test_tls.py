"""TLS: what it carries, the connections before their handshake, and answers that nobody reads."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import pytest

from embert.server.http.connections import unread_bytes
from embert.server.http.protocol import HEAD_TIMEOUT_S
from tests.server.http.echo_server import GET, LARGE, Client, Serving, chunked, play, post, serving, skip

GET_LARGE = b"GET /large HTTP/1.1\r\nhost: h\r\n\r\n"
Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Contexts:
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=h -keyout key -out cert"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    server, clients = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(folder / "cert", folder / "key")
    clients.check_hostname = False
    clients.load_verify_locations(Path(folder, "cert"))
    return server, clients


async def connect(server: Serving) -> Client:
    """Without TLS."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    client = Client(reader, writer)
    server.clients.append(client)
    return client


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
def test_requests_over_tls(tls: Contexts, version: ssl.TLSVersion) -> None:
    async def scene() -> None:
        clients = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        clients.check_hostname, clients.verify_mode = False, ssl.CERT_NONE
        clients.minimum_version = clients.maximum_version = version
        async with serving(tls=(tls[0], clients)) as server:
            client = await server.connect()
            body = LARGE[:3_000_000]
            await client.send(post(body), post(b"b"), chunked(b"c", b"d"), GET_LARGE)
            bodies = [(await client.answer()).body for _ in range(4)]
            assert bodies == [b"/echo " + body, b"/echo b", b"/echo cd", LARGE]
            answer = await client.ask(post(b"", "/echo", b"connection: close"))
            assert answer.closes
            assert await client.rest() == []

    play(scene)


def test_connections_count_before_their_handshake(tls: Contexts) -> None:
    async def scene() -> None:
        async with serving(3, 1, tls=tls) as server:
            silent = [await connect(server) for _ in range(3)]
            await server.count(3)
            for _ in range(3):  # each takes the place of the one that has been silent for longest
                assert await (await server.connect()).is_open()
                assert len(server.connections) == 3
            assert all([await each.reader.read() == b"" for each in silent])

    play(scene)


def test_a_handshake_has_its_time(tls: Contexts) -> None:
    async def scene() -> None:
        async with serving(tls=tls) as server:
            silent = await connect(server)
            await server.count(1)
            await silent.send(b"\x16\x03\x01\x02\x00\x01")  # a record that does not end
            await skip(HEAD_TIMEOUT_S - 1)
            assert len(server.connections) == 1
            await skip(2)
            await server.count(0)

    play(scene)


def test_what_is_not_tls_is_closed(tls: Contexts) -> None:
    async def scene() -> None:
        async with serving(tls=tls) as server:
            plain = await connect(server)
            await plain.send(GET)
            assert not (await plain.reader.read()).startswith(b"HTTP")
            await server.count(0)
            assert not server.asked

    play(scene)


def test_an_answer_is_encrypted_as_its_client_reads(tls: Contexts) -> None:
    async def scene() -> None:
        async with serving(tls=tls) as server:
            client = await server.connect()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await client.send(GET_LARGE + GET)
            (connection,) = server.connections
            while not unread_bytes(connection):
                await asyncio.sleep(0.002)
            raw = connection.transport.transport  # type: ignore[attr-defined]
            assert raw.get_write_buffer_size() < 200_000
            assert len(LARGE) > connection.transport.get_write_buffer_size() > len(LARGE) // 8
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert (await client.answer()).body == LARGE
            assert (await client.answer()).status == 200
            assert unread_bytes(connection) == 0

    play(scene)
