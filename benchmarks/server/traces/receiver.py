"""A receiver of spans in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from benchmarks.lib.otlp_receiver import OtlpReceiver

__all__ = ["receiver"]


@contextmanager
def receiver() -> Iterator[Connection]:
    """A receiver in a process: it sends its URL, and for each message the spans so far."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that its end is noticed here
    try:
        yield ours
    finally:
        ours.close()
        process.terminate()
        process.join()


def _receive(connection: Connection) -> None:
    with OtlpReceiver(keeps=False) as receiver:
        connection.send(receiver.url)
        while True:
            connection.recv()
            connection.send(receiver.count)
