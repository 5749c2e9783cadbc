"""Messages of several threads arrive whole, and none goes to a lost connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from embert.server.engine_worker import socket_server
from embert.server.engine_worker.socket_server import SocketServer
from embert.server.ipc.channel import (
    Channel,
    EngineStatus,
    PartialResult,
    Results,
    Submit,
    TaskRows,
    address,
    decode_results,
    encode,
)
from tests.server.live import until
from tests.server.wire import Wire

THREADS, EACH = 4, 400


class Engine:
    """A socket server and what it received."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.submits: list[tuple[Channel, Submit]] = []
        self.gone: list[Channel] = []
        self.asked = 0  # times that the status was asked for
        self.server = SocketServer(
            self.status, lambda channel, submit: self.submits.append((channel, submit)), self.gone.append
        )
        self.server.listen(path)

    def status(self) -> EngineStatus:
        self.asked += 1
        return status()

    def channel_of(self, wire: Wire, number: int) -> Channel:
        """The engine's end of a connection that this makes known by a number."""
        wire.send(encode(Submit([], [number])))
        until(lambda: any(submit.cancelled == [number] for _, submit in self.submits))
        return next(channel for channel, submit in self.submits if submit.cancelled == [number])


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(socket_server, "STATUS_INTERVAL_S", 0.05)
    monkeypatch.setattr(socket_server, "LINGER_S", 60.0)
    made = Engine(f"{tmp_path}/engine")
    yield made
    made.server.close()


def status() -> EngineStatus:
    return EngineStatus(7, 1.0, 2, [3.0])


def part(number: int, size: int = 100) -> PartialResult:
    return PartialResult(number, 0, 1, [TaskRows(1, number.to_bytes(4, "little") * size)], 0.0, 0.0)


def test_every_message_of_every_thread_arrives_once(engine: Engine) -> None:
    wire = Wire.connect(engine.path)
    channel = engine.channel_of(wire, 1)

    def work(thread: int) -> None:
        for number in range(thread * EACH, (thread + 1) * EACH):
            engine.server.send(channel, [part(number, 2000)])  # more than the socket holds

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    found: list[PartialResult] = []
    while len(found) < THREADS * EACH:
        message = wire.next()
        assert message is not None
        found += decode_results(message).parts
    for thread in threads:
        thread.join()
    assert sorted(found, key=lambda each: each.id) == [part(number, 2000) for number in range(THREADS * EACH)]
    for sender in range(THREADS):
        in_order = [each.id for each in found if each.id // EACH == sender]
        assert in_order == sorted(in_order)
    wire.close()


def test_a_status_at_once_and_every_interval(engine: Engine) -> None:
    """Also while nobody is connected: it is the engine's sign of life."""
    until(lambda: engine.asked >= 4)
    wire = Wire.connect(engine.path)
    for _ in range(5):
        message = wire.next()
        assert message is not None
        assert decode_results(message) == Results(status(), [])
    wire.close()


def test_a_lost_connection_is_reported_once_and_gets_nothing(engine: Engine) -> None:
    gone, other = Wire.connect(engine.path), Wire.connect(engine.path)
    channels = engine.channel_of(gone, 1), engine.channel_of(other, 2)
    gone.close()
    until(lambda: engine.gone == [channels[0]])
    engine.server.send(channels[0], [part(1)])
    engine.server.send(channels[1], [part(2)])
    parts: list[PartialResult] = []
    while not parts:
        message = other.next()
        assert message is not None
        parts = decode_results(message).parts
    assert parts == [part(2)]
    assert engine.gone == [channels[0]]
    other.close()


@pytest.mark.parametrize("message", [b"", b"\xff" * 100, b"\x92\x01"])
def test_a_malformed_message_ends_its_connection(engine: Engine, message: bytes) -> None:
    stranger, other = Wire.connect(engine.path), Wire.connect(engine.path)
    stranger.send(message)
    assert stranger.closed()
    engine.channel_of(other, 1)
    assert len(engine.gone) == 1
    stranger.close()
    other.close()


def test_closing_sends_what_is_left_and_disconnects(engine: Engine) -> None:
    wire = Wire.connect(engine.path)
    channel = engine.channel_of(wire, 1)
    engine.server.send(channel, [part(5, 500_000)])  # more than the socket holds
    closing = threading.Thread(target=engine.server.close)
    closing.start()
    parts: list[PartialResult] = []
    while not parts:
        message = wire.next()
        assert message is not None
        parts = decode_results(message).parts
    assert parts == [part(5, 500_000)]
    assert wire.closed()
    closing.join()
    engine.server.send(channel, [part(6)])  # to nobody
    wire.close()
    with pytest.raises(OSError, match="refused"):
        Channel.connect(engine.path)
    engine.server = Engine(engine.path + ".next").server  # for the fixture to close


def test_another_users_process_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends: any user may connect to a name, or take one before its owner does."""
    with monkeypatch.context() as patch:
        patch.setattr("embert.server.ipc.channel.os.geteuid", lambda: 12345)
        with pytest.raises(PermissionError, match="another user"):
            Channel.connect(engine.path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(address(engine.path))
        wire = Wire(Channel(sock))
        assert wire.closed()
        wire.close()
    wire = Wire.connect(engine.path)
    assert wire.next() is not None  # its status
    wire.close()
