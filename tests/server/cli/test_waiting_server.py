"""The server of a download hands its sockets over: no client is lost between it and the HTTP processes."""

from __future__ import annotations

import asyncio
import socket
import threading

from embert.server.cli.waiting_server import Downloads, _WaitingServer
from embert.server.config import ServeConfig
from embert.server.http.auth import Keys
from embert.server.observability.metric_memory import MetricMemory

CLIENTS = 40


def test_a_client_is_answered_or_stays_in_the_backlog() -> None:
    waiting = _WaitingServer(Keys(ServeConfig(), frozenset()), Downloads(["m"]), MetricMemory.create([]))
    with socket.create_server(("127.0.0.1", 0), backlog=CLIENTS) as listening:
        clients = [socket.create_connection(listening.getsockname(), 60) for _ in range(CLIENTS)]

        async def hand_over() -> None:
            """End while clients wait, right after the first are accepted."""
            ended = threading.Event()
            asyncio.get_running_loop().call_soon(ended.set)
            await waiting.serve([listening], None, None, ended)

        for client in clients:
            client.sendall(b"GET /livez HTTP/1.1\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
        asyncio.run(hand_over())
        left = 0
        try:
            while True:  # as an HTTP process does
                connection, _ = listening.accept()
                left += 1
                connection.sendall(b"HTTP/1.1 200 from another process")
                connection.close()
        except BlockingIOError:
            pass
        answers = []
        for client in clients:
            with client:
                answers.append(client.recv(100))
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert sum(b"another process" in answer for answer in answers) == left
    assert left < CLIENTS
