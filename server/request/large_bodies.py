"""Large bodies: parsed step by step, and refused before that where they hold more than the limits can allow.

Parsing holds the event loop: 0.1 µs for every number, string and list, and up to 5 ns for every byte of a string. The
limits here are above what any request needs. So nothing is refused that the limits of its fields allow, and the rest
is counted again once the fields are known.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
from pydantic import BaseModel

from embert.server.http.errors import PayloadTooLarge

LARGE = 65_536  # bytes; a smaller body is parsed within a millisecond
_OTHER_STRINGS = 4096  # names of fields, and values of fields that are not read
_OTHER_VALUES = 65_536
_MOST_VALUES = 1 << 20

_OTHER_CONTAINERS = 4096
_CONTAINERS_PER_TEXT = 4  # an object with its lists

# `\s*+` and `?+` take what they can for good: a body of spaces is read once.
_IDS = re.compile(rb'"(inputs?|ids)"\s*+:\s*+(\[\s*+(\[\s*+)?+[0-9])')
_NO_INTEGERS = (b".", b"e", b"E")  # msgspec would take 1.0 and 1e3 for integers
# In place of ids: no field takes it, and it is as short as the shortest list, so that errors give the right column.
_STAND_IN = b"7E9"

_NUMBER_BYTES = 28  # of a number in a list, in addition to its reference
_NUMBERS = {int, float}


class SplitIds(NamedTuple):
    """A body with token ids in two parts; see `split_ids`."""

    rest: bytes  # the body with `stand_in` and spaces in place of the ids
    field: str  # that has them
    ids: list[int] | list[list[int]]
    stand_in: float = float(_STAND_IN)


def check_values(
    body: bytes,
    most_texts: int,
    most_ids: int,
    *,
    option: str = "--max-client-batch-size",
    strings_per_text: int = 1,
) -> None:
    """Raise PayloadTooLarge for a body with more strings, lists or objects than `most_texts` can be, or more values
    than `most_ids`.

    `option` is what limits the texts.
    """
    most_strings = strings_per_text * most_texts + _OTHER_STRINGS
    most_containers = _CONTAINERS_PER_TEXT * most_texts + _OTHER_CONTAINERS
    most_values = min(most_ids + _OTHER_VALUES, _MOST_VALUES)
    if (
        body.count(b'"') // 2 <= most_strings
        and _containers(body) <= most_containers
        and body.count(b",") <= most_values
    ):
        return
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    option = f"{option} {most_texts}"
    if (strings := body.count(b'"') // 2) > most_strings:
        raise PayloadTooLarge(f"the request body has {strings} strings", limit=most_strings, option=option)
    outside = b"".join(body.split(b'"')[::2])  # of strings
    if (containers := _containers(outside)) > most_containers:
        reason = f"the request body has {containers} lists and objects"
        raise PayloadTooLarge(reason, limit=most_containers, option=option)
    if (commas := outside.count(b",")) > most_values:
        raise PayloadTooLarge(f"the request body has {commas} values or more", limit=most_values)


def _containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def split_ids(body: bytes) -> SplitIds | None:
    """A body with token ids in two parts, None for other bodies.

    Three times as fast as validating every id as part of a field. An invalid body is left to that validation.
    """
    match = _IDS.search(body)
    if match is None:
        return None
    begin = match.start(2)
    end = body.find(b'"', begin)
    end = body.rfind(b"]", begin, end if end >= 0 else len(body)) + 1
    if not end or any(body.find(sign, begin, end) >= 0 for sign in _NO_INTEGERS):
        return None
    try:
        text = memoryview(body)[begin:end]
        ids: list[int] | list[list[int]] = (
            msgspec.json.decode(text, type=list[list[int]]) if match[3] else msgspec.json.decode(text, type=list[int])
        )
    except msgspec.MsgspecError:
        return None
    rest = body[:begin] + _STAND_IN.ljust(end - begin) + body[end:]
    return SplitIds(rest, match[1].decode(), ids)


def memory_of(value: object) -> int:
    """Bytes of what a parsed body holds. They may be more than the body's: one emoji makes four of each letter of its
    text, a number of two digits is an object, and so is a list of nothing."""
    size = 0
    level: list[Any] = [value]
    while level:
        level = [
            {**vars(each), **(each.__pydantic_extra__ or {})} if isinstance(each, BaseModel) else each for each in level
        ]
        size += sum(map(sys.getsizeof, level))
        inner: list[Iterable[Any]] = []
        for each in level:
            if isinstance(each, list):
                # The types of many numbers are looked at faster than the numbers.
                if each and isinstance(each[0], int | float) and {*map(type, each)} <= _NUMBERS:
                    size += _NUMBER_BYTES * len(each)
                else:
                    inner.append(each)
            elif isinstance(each, dict):
                inner += (each.keys(), each.values())
        level = [*itertools.chain.from_iterable(inner)]
    return size
