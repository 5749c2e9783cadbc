"""Messages of any size arrive whole and in order, in whatever pieces the kernel takes and gives them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embert.server.ipc.channel import MESSAGE_BYTES, Channel

LARGE = 5_000_000  # more than a socket holds


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = map(Channel, socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


@settings(deadline=None)
@given(st.lists(st.integers(0, 70_000), max_size=12), st.integers(1, 100_000))
def test_messages_arrive_however_they_are_cut(sizes: list[int], piece: int) -> None:
    messages = [bytes([index]) * size for index, size in enumerate(sizes)]
    sender, receiver = socket.socketpair()
    channel = Channel(receiver)
    stream = b"".join(struct.pack("<I", len(message)) + message for message in messages)
    received: list[bytes | memoryview] = []
    for start in range(0, len(stream), piece):
        sender.sendall(stream[start : start + piece])
        received += channel.receive()
    while len(received) < len(messages):
        received += channel.receive()
    sender.close()
    with pytest.raises(EOFError):
        channel.receive()
    channel.close()
    assert received == messages


def test_what_the_other_side_does_not_take_is_kept(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    messages = [b"a", b"b" * LARGE, b"", b"c" * 100]
    assert ours.send(messages[0])
    assert not ours.send(messages[1])
    assert not ours.send(messages[2])
    assert not ours.send(messages[3])
    assert not ours.flush()
    received: list[bytes | memoryview] = []
    while len(received) < len(messages):
        ours.flush()
        received += theirs.receive()
    assert ours.flush()
    assert received == messages


@pytest.mark.parametrize("cut", [1, 4])
def test_a_length_that_no_message_has_is_refused(cut: int) -> None:
    sender, receiver = socket.socketpair()
    channel = Channel(receiver)
    frame = struct.pack("<I", MESSAGE_BYTES + 1)
    sender.sendall(frame[:cut])
    if cut < len(frame):
        assert channel.receive() == []
        sender.sendall(frame[cut:])
    with pytest.raises(ValueError, match="a message of 1073741825 bytes"):
        channel.receive()
    sender.close()
    channel.close()
