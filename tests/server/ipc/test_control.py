"""The control connection between the supervisor and its children, and the messages on it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from embert.server.ipc.control import (
    ControlConnection,
    Drain,
    Failed,
    Ready,
)

Ends = tuple[ControlConnection, ControlConnection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ControlConnection(ours), ControlConnection(theirs)


def test_drain_gives_whole_messages_only(ends: Ends) -> None:
    ours, theirs = ends
    ours.socket.sendall(b'{"type":"Drain"}\n{"type":"Fai')
    assert list(theirs.drain()) == [Drain()]
    ours.socket.sendall(b'led","message":"x"}\n')
    assert list(theirs.drain()) == [Failed("x")]


def test_what_is_read_together_with_the_first_message_is_not_lost(
    ends: Ends,
) -> None:
    ours, theirs = ends
    ours.send(Ready())
    ours.send(Drain())
    assert theirs.receive() == Ready()
    ours.send(Failed("x"))
    assert list(theirs.drain()) == [Drain(), Failed("x")]
