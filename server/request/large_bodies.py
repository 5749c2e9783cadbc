"""Large bodies: parsed step by step, and refused before that where they hold more than the limits can allow.

Parsing holds the event loop: 0.1 µs for every number and string, and up to 5 ns for every byte of a string. The counts
here are lower bounds. So nothing is refused that the limits allow, and the rest is counted again once the
fields are known.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable, Iterable

import msgspec
from pydantic import BaseModel

from embert.server.http.errors import PayloadTooLarge

__all__ = ["LARGE", "CooperativeSteps", "SplitIds", "check_values", "memory_of", "split_ids"]

LARGE = 65_536  # bytes; a smaller body is parsed within a millisecond
_OTHER_STRINGS = 4096  # names of fields, and values of fields that are not read
_OTHER_VALUES = 65_536
_MOST_VALUES = 1 << 20

_IDS = re.compile(rb'"(?:inputs?|ids)"\s*:\s*(\[\s*(\[?)\s*[0-9])')
_NO_INTEGERS = (b".", b"e", b"E")  # msgspec would take 1.0 and 1e3 for integers
_STAND_IN = -(1 << 40)  # no token's id

_ID_BYTES = 36  # of a number in a list

SplitIds = tuple[bytes, int, list[int] | list[list[int]]]  # see `split_ids`


class CooperativeSteps:
    """Runs work that holds the event loop for milliseconds: one step at a time, with a pause as long after each.

    An ordinary request needs the loop a few times. So it waits for one step of one large body, not for several.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, steps: Iterable[Callable[[], None]], check_time: Callable[[], None]) -> None:
        """Run the steps for a body, and `check_time` before each. Raises what they raise."""
        async with self._lock:
            for step in steps:
                check_time()
                began = time.perf_counter()
                try:
                    step()
                finally:
                    await asyncio.sleep(time.perf_counter() - began)


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

    Three times as fast as validating every id as part of a field. An invalid body is left to that validation.
    """
    match = _IDS.search(body)
    if match is None:
        return None
    begin = match.start(1)
    end = body.find(b'"', begin)
    end = body.rfind(b"]", begin, end if end >= 0 else len(body)) + 1
    if not end or any(body.find(sign, begin, end) >= 0 for sign in _NO_INTEGERS):
        return None
    try:
        text = memoryview(body)[begin:end]
        ids: list[int] | list[list[int]] = (
            msgspec.json.decode(text, type=list[list[int]]) if match[2] else msgspec.json.decode(text, type=list[int])
        )
    except msgspec.MsgspecError:
        return None
    return b"%b[%d]%b" % (body[:begin], _STAND_IN, body[end:]), _STAND_IN, ids


def memory_of(value: object) -> int:
    """Bytes of the strings and numbers in a parsed body. They may be more than the body's: one emoji makes four of each
    letter of its text, and a number of two digits is an object."""
    if isinstance(value, str):
        return sys.getsizeof(value)
    if isinstance(value, list):
        if value and isinstance(value[0], int):
            return _ID_BYTES * len(value)
        return sum(map(memory_of, value))
    if isinstance(value, dict):
        return sum(map(memory_of, value.values()))
    return sum(map(memory_of, vars(value).values())) if isinstance(value, BaseModel) else 0
