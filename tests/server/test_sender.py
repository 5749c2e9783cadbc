"""What several threads send at once arrives whole, and nothing goes to who is gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from server import sender
from server.messages import Part, Results, Status, decode_results
from server.sender import Sender

THREADS, EACH, PEERS = 4, 400, 3


class Peer:
    """An API process's end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.endpoint = endpoint
        self.inbox = context.socket(zmq.PULL)
        self.inbox.bind(endpoint)

    def next(self, within_s: float = 5.0) -> Results | None:
        return decode_results(self.inbox.recv()) if self.inbox.poll(round(within_s * 1e3)) else None


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[list[Peer]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = [Peer(context, f"ipc://{tmp_path}/{i}") for i in range(PEERS)]
    yield made
    for peer in made:
        peer.inbox.close(linger=0)
    context.term()


def status() -> Status:
    return Status(7, 1.0, 2, 3.0)


def part(number: int) -> Part:
    return Part(number, 0, 1, number.to_bytes(4, "little") * 100, 0.0, 0.0)


def test_every_message_of_every_thread_arrives_once(peers: list[Peer]) -> None:
    ours = Sender(zmq.Context(), status)

    def work(thread: int) -> None:
        for number in range(thread * EACH, (thread + 1) * EACH):
            peer = peers[number % PEERS]
            ours.connect(peer.endpoint)  # all of them at once, the first time
            ours.send(peer.endpoint, [part(number)])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ours.close()
    found: list[int] = []
    for index, peer in enumerate(peers):
        while (results := peer.next(0.5)) is not None:
            assert results.status == status()
            for each in results.parts:
                assert each == part(each.id)
                assert each.id % PEERS == index
                found.append(each.id)
        in_order = [number for number in found if number // EACH == 0 and number % PEERS == index]
        assert in_order == sorted(in_order)
    assert sorted(found) == list(range(THREADS * EACH))


def test_a_status_at_once_and_every_interval(peers: list[Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "STATUS_INTERVAL_S", 0.05)
    peer = peers[0]
    ours = Sender(zmq.Context(), status)
    ours.connect(peer.endpoint)
    ours.connect(peer.endpoint)
    assert all(peer.next() == Results(status(), []) for _ in range(5))
    ours.close()


def test_nothing_is_sent_to_strangers_or_after_the_end(peers: list[Peer]) -> None:
    gone, left, _ = peers
    ours = Sender(zmq.Context(), status)
    ours.send(gone.endpoint, [part(1)])
    ours.connect(gone.endpoint)
    assert gone.next() == Results(status(), [])  # the stranger's part was dropped
    ours.forget(gone.endpoint)
    ours.forget(gone.endpoint)
    ours.send(gone.endpoint, [part(2)])
    assert gone.next(0.2) is None
    ours.close()
    ours.connect(left.endpoint)
    ours.send(left.endpoint, [part(3)])
    assert left.next(0.2) is None
