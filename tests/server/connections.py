"""Connections below the level of HTTP clients: raw sockets, and one to each HTTP process."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import psutil

from tests.server.live import Live, until

# For `constants` of `live`, because a busy machine may stop a process for a while:
# an HTTP process keeps its share of the connections,
EVEN = {"embert.server.http.acceptor.SILENT_S": 60.0}
# and the server waits longer for a client that it has refused.
LINGERS = {f"embert.server.http.protocol.{name}": 300.0 for name in ("LINGER_QUIET_S", "LINGER_S", "SURPLUS_S")}


def connect(server: Live, timeout_s: float = 120.0) -> socket.socket:
    """A connection that nothing was sent on."""
    return socket.create_connection(("127.0.0.1", server.ports[0]), timeout=timeout_s)


def connection_counts(server: Live) -> list[int]:
    """Numbers of open connections of the HTTP processes."""
    port = server.ports[0]
    return [
        sum(c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in found)
        for found in (psutil.Process(pid).net_connections("tcp") for pid in server.http_pids)
    ]


def head(length: int, path: str = "/embed") -> bytes:
    """The head of a POST whose body has this length."""
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode()


def send(server: Live, body: object) -> socket.socket:
    """POST to /embed without waiting for the response; who closes the socket leaves."""
    content = json.dumps(body).encode()
    sock = connect(server)
    sock.sendall(head(len(content)) + content)
    return sock


def read_all(sock: socket.socket) -> bytes:
    """All bytes until the other side closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            received += piece
    return received


@contextlib.contextmanager
def one_to_each(server: Live) -> Iterator[dict[int, http.client.HTTPConnection]]:
    """A connection to every HTTP process, by its pid."""
    with contextlib.ExitStack() as stack:

        def connect_once_more() -> dict[int, http.client.HTTPConnection]:
            connection = http.client.HTTPConnection("127.0.0.1", server.ports[0], timeout=120)
            stack.callback(connection.close)
            connection.connect()
            connection.request("GET", "/livez")  # so that it is accepted
            connection.getresponse().read()
            made.append(connection)
            found = {}
            for pid in server.http_pids:
                ports = {each.raddr.port for each in psutil.Process(pid).net_connections("tcp") if each.raddr}
                for each in made:
                    if each.sock.getsockname()[1] in ports:
                        found[pid] = each
            return found if len(found) == len(server.http_pids) else {}

        made: list[http.client.HTTPConnection] = []
        yield until(connect_once_more, what="a connection to each HTTP process")


def post_on(connection: http.client.HTTPConnection, body: Any, **headers: str) -> tuple[int, dict[str, str], str]:
    """Status, headers and body of a POST /embed."""
    connection.request("POST", "/embed", json.dumps(body), headers)
    response = connection.getresponse()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read().decode()
