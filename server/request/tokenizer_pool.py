"""The tokenizer's threads: large inputs are tokenized in chunks, in parallel and off the event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from embert.engine.errors import InputError, InputTooLarge
from embert.engine.tokenization.chunks import Chunks
from embert.server.http.errors import Invalid, Overloaded, PayloadTooLarge

__all__ = ["TokenizerPool", "input_errors"]

MAX_WAITING_BODIES = 2  # the characters, or ids, that may wait for the threads, in bodies of --payload-limit
_CHARACTERS_PER_S = 1_000_000  # of one thread, at the least

ResultT = TypeVar("ResultT")


class TokenizerPool:
    """One per API process, for all of its models."""

    def __init__(self, threads: int, payload_limit: int) -> None:
        self._threads, self._payload_limit = threads, payload_limit
        self._executor = ThreadPoolExecutor(threads, "tokenize")
        self._waiting = 0  # characters, or ids, of the requests that are here

    async def run(
        self,
        chunks: Chunks[ResultT],
        size: int,
        receive: Callable[[], Awaitable[Any]] | None,
        check: Callable[[int], None],
    ) -> ResultT:
        """Do the tokenizer's work for one request of `size` characters, or ids; other requests run between its chunks.

        `check` gets the number of tokens so far after each chunk, and raises where the work must end: over a limit, or
        out of time. Raises Overloaded where too much waits already, CancelledError when the client has left, and what
        `chunks` raises, as ServerErrors.
        """
        self._check_waiting(size)
        loop = asyncio.get_running_loop()
        left: asyncio.Task[None] | None = None
        self._waiting += size
        try:
            with input_errors():
                while True:
                    tokens, last = await loop.run_in_executor(self._executor, _next_chunk, chunks)
                    if last is not None:
                        return last.value  # type: ignore[no-any-return]
                    check(tokens)
                    if left is not None and left.done():
                        raise asyncio.CancelledError
                    if left is None and receive is not None:
                        left = loop.create_task(_until_left(receive))
        finally:
            self._waiting -= size
            if left is not None:
                left.cancel()

    def _check_waiting(self, size: int) -> None:
        limit = MAX_WAITING_BODIES * self._payload_limit
        if self._waiting and self._waiting + size > limit:
            raise Overloaded(
                f"the tokenizer has {self._waiting} characters to do and this request has {size}; the limit is {limit} "
                f"({MAX_WAITING_BODIES} times --payload-limit)",
                retry_after_s=math.ceil(self._waiting / (_CHARACTERS_PER_S * self._threads)),
            )

    def close(self) -> None:
        """Stop the threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _next_chunk(chunks: Chunks[Any]) -> tuple[int, StopIteration | None]:
    try:
        return next(chunks), None
    except StopIteration as last:
        return 0, last


async def _until_left(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _InputErrors:
    """A class, because a generator costs each request a microsecond."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, InputTooLarge):
            raise PayloadTooLarge(f"{error} (--max-unbroken-characters)", error.param) from None
        if isinstance(error, InputError):
            raise Invalid(str(error), error.param, kind=error.kind.capitalize()) from None


_INPUT_ERRORS = _InputErrors()


def input_errors() -> AbstractContextManager[None]:
    """The tokenizer's errors, as answers."""
    return _INPUT_ERRORS
