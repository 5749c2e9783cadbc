"""Chunked work: generators that yield every few milliseconds, so that other work can run and the caller can stop."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

__all__ = ["NO_LIMIT", "Chunks", "finish", "groups"]

NO_LIMIT = 1 << 62

ResultT = TypeVar("ResultT")
Chunks = Generator[int, None, ResultT]  # yields the number of tokens so far after each chunk, and returns the result


def finish(chunks: Chunks[ResultT]) -> ResultT:
    """Run all chunks and return the result."""
    while True:
        try:
            next(chunks)
        except StopIteration as last:
            result: ResultT = last.value
            return result


def groups(sizes: Iterable[int], most: int) -> Iterator[slice]:
    """Group neighbors whose sizes add up to at most `most`; a larger one gets its own group."""
    first = last = together = 0
    for last, size in enumerate(sizes, 1):
        if together and together + size > most:
            yield slice(first, last - 1)
            first, together = last - 1, 0
        together += size
    if first < last:
        yield slice(first, last)
