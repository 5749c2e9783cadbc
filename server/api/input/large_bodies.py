"""Large bodies: parsed step by step, and refused before that where they hold more than the limits can allow.

Parsing holds the event loop: 0.1 µs for every number and string, and up to 5 ns for every byte of a string. The counts
here are lower bounds. So nothing is refused that the limits allow, and what slips through is counted again once the
fields are known.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable

import msgspec

from embert.server.http.errors import Overloaded, PayloadTooLarge

__all__ = ["LARGE", "CooperativeSteps", "SplitIds", "check_values", "split_ids"]

LARGE = 65_536  # bytes; a smaller body is parsed within a millisecond, whatever it holds
_OTHER_STRINGS = 4096  # names of fields, and values of fields that nobody reads
_OTHER_VALUES = 65_536
_MOST_VALUES = 1 << 20

_IDS = re.compile(rb'"(?:inputs?|ids)"\s*:\s*(\[\s*(\[?)\s*[0-9])')
_NO_INTEGERS = (b".", b"e", b"E")  # msgspec would take 1.0 and 1e3 for integers
_STAND_IN = -(1 << 40)  # no token's id

SplitIds = tuple[bytes, int, list[int] | list[list[int]]]  # see `split_ids`


class CooperativeSteps:
    """Runs work that holds the event loop for milliseconds: one step at a time, with a rest as long after each.

    An ordinary request needs the loop a few times. It so waits for one step of one large body, not for several.
    """

    def __init__(self, limit: int) -> None:
        """`limit` is what may wait for its steps, in bytes of bodies."""
        self._limit = limit
        self._waiting = 0
        self._lock = asyncio.Lock()

    async def run(self, size: int, steps: Iterable[Callable[[], None]], check_time: Callable[[], None]) -> None:
        """Run the steps for a body of `size` bytes, and `check_time` before each.

        Raises Overloaded where too much waits already, and whatever a step or `check_time` raises.
        """
        if self._waiting and self._waiting + size > self._limit:
            raise Overloaded(
                f"bodies of {self._waiting} bytes wait to be parsed and this one has {size}; "
                f"the limit is {self._limit} (--max-body-bytes)",
                retry_after_s=1,
            )
        self._waiting += size
        try:
            async with self._lock:
                for step in steps:
                    check_time()
                    began = time.perf_counter()
                    try:
                        step()
                    finally:
                        await asyncio.sleep(time.perf_counter() - began)
        finally:
            self._waiting -= size


def check_values(
    body: bytes,
    most_texts: int,
    most_ids: int,
    *,
    option: str = "--max-client-batch-size",
    strings_per_text: int = 1,
) -> None:
    """Raise PayloadTooLarge for a body with more strings than `most_texts` can be, or more values than `most_ids`.

    `option` is what limits the texts.
    """
    limit = strings_per_text * most_texts + _OTHER_STRINGS
    strings = body.count(b'"') // 2
    if strings > limit:
        # A quote after a backslash is part of a string. One after two may end it; leaving it out keeps a lower bound.
        strings -= (body.count(b'\\"') + 1) // 2
    if strings > limit:
        raise PayloadTooLarge(
            f"the request body has {strings} strings or more; the limit is {limit}, for {most_texts} texts ({option})"
        )
    limit = min(most_ids + _OTHER_VALUES, _MOST_VALUES)
    if body.count(b",") > limit and (commas := _commas(body)) > limit:
        raise PayloadTooLarge(f"the request body has {commas} values or more; the limit is {limit}")


def _commas(body: bytes) -> int:
    """Commas outside of strings."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return sum(part.count(b",") for part in body.split(b'"')[::2])


def split_ids(body: bytes) -> SplitIds | None:
    """A body with token ids → the body without them, the id that stands for them, and the ids. None for other bodies.

    Three times as fast as validating every id as part of a field. A body that is not quite right is left to that.
    """
    found = _IDS.search(body)
    if found is None:
        return None
    begin = found.start(1)
    end = body.find(b'"', begin)
    end = body.rfind(b"]", begin, end if end >= 0 else len(body)) + 1
    if not end or any(body.find(sign, begin, end) >= 0 for sign in _NO_INTEGERS):
        return None
    try:
        text = memoryview(body)[begin:end]
        ids: list[int] | list[list[int]] = (
            msgspec.json.decode(text, type=list[list[int]]) if found[2] else msgspec.json.decode(text, type=list[int])
        )
    except msgspec.MsgspecError:
        return None
    return b"%b[%d]%b" % (body[:begin], _STAND_IN, body[end:]), _STAND_IN, ids
