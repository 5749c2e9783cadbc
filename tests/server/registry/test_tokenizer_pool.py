"""Large inputs alternate on the tokenizer's threads, and stop when their client leaves. No clock, no sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from embert.engine.tokenization.encoded import Chunks
from embert.server.http.errors import Overloaded, PayloadTooLarge, ServerError, Unavailable
from embert.server.registry.tokenizing import TokenizerPool


async def stays() -> Any:
    await asyncio.Event().wait()


async def leaves() -> Any:
    return {"type": "http.disconnect"}


def pool_of(*, payload_limit: int = 10_000_000) -> TokenizerPool:
    return TokenizerPool(1, payload_limit)


def counting(done: list[str], name: str, chunks: int) -> Chunks[str]:
    for chunk in range(chunks):
        done.append(name)
        yield chunk
    return name


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def waited() -> Any:
        return await asyncio.wait_for(work(), 120)

    return asyncio.run(waited())


def ignore(tokens: int) -> None:
    pass


def test_requests_alternate() -> None:
    pool = pool_of()
    done: list[str] = []

    async def both() -> None:
        large = asyncio.ensure_future(pool.run(counting(done, "large", 50), 1, stays, ignore))
        while not done:
            await asyncio.sleep(0)
        assert await pool.run(counting(done, "small", 2), 1, stays, ignore) == "small"
        assert not large.done()
        assert await large == "large"

    run(both)
    # The chunk at work may end before the small one comes, and another begin.
    assert done.index("small") <= 3
    assert len(done) == 52
    pool.close()


def test_work_stops_when_its_client_leaves() -> None:
    pool = pool_of()
    done: list[str] = []

    async def work() -> None:
        with pytest.raises(asyncio.CancelledError):
            await pool.run(counting(done, "a", 100_000), 1, leaves, ignore)

    run(work)
    assert len(done) < 1000
    pool.close()


@pytest.mark.parametrize("error", [PayloadTooLarge("too many"), Unavailable("too late", reject_reason="deadline")])
def test_work_stops_when_it_is_too_much_or_too_late(error: ServerError) -> None:
    pool = pool_of()
    done: list[str] = []

    def at_most_five(tokens: int) -> None:
        if tokens > 5:
            raise error

    with pytest.raises(type(error), match=error.message):
        run(lambda: pool.run(counting(done, "a", 1000), 1, stays, at_most_five))
    assert len(done) == 7
    pool.close()


def test_what_waits_for_the_tokenizer_is_bounded() -> None:
    pool = pool_of(payload_limit=1000)
    gate = threading.Event()

    def gated() -> Chunks[str]:
        gate.wait(120)
        yield 1
        return "done"

    async def work() -> None:
        first = asyncio.ensure_future(pool.run(gated(), 5000, stays, ignore))  # the only one, whatever it has
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await pool.run(gated(), 1, stays, ignore)
        assert all(value in refused.value.message for value in ("5000", "1", "2000", "--payload-limit"))
        assert refused.value.retry_after_s == 1
        gate.set()
        assert await first == "done"
        assert await pool.run(gated(), 1, stays, ignore) == "done"

    run(work)
    pool.close()
