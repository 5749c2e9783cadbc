"""Bodies of many values: refused before they are parsed where the limits cannot allow them, and read fast elsewhere.

Parsing holds the event loop, 0.1 µs for every number and string. What is counted here is at most what there is: nothing
is refused that the limits allow, and what is let through wrongly is counted again by those who know the fields.
"""

from __future__ import annotations

import re

import msgspec

from server.errors import PayloadTooLarge

__all__ = ["LARGE", "check_values", "split_ids"]

LARGE = 65_536  # bytes: smaller bodies are parsed in a millisecond, whatever is in them
_OTHER_STRINGS = 4096  # names of fields, and what clients put into fields that nobody reads
_OTHER_VALUES = 65_536
_MOST_VALUES = 1 << 20

_IDS = re.compile(rb'"(?:inputs?|ids)"\s*:\s*(\[\s*(\[?)\s*[0-9])')
_NO_INTEGERS = (b".", b"e", b"E")  # which msgspec takes for integers where their value is one
_STAND_IN = -(1 << 40)  # no token's id


def check_values(body: bytes, most_texts: int, most_ids: int) -> None:
    """Raise PayloadTooLarge for a body with more strings or values than so many texts, or ids, can account for."""
    limit = most_texts + _OTHER_STRINGS
    strings = body.count(b'"') // 2
    if strings > limit:
        # A quote after a backslash is part of a string; one after two may end it and is left out all the same.
        strings -= (body.count(b'\\"') + 1) // 2
    if strings > limit:
        raise PayloadTooLarge(
            f"the request body has {strings} strings or more; the limit is {limit}, for {most_texts} texts "
            "(--max-client-batch-size)"
        )
    limit = min(most_ids + _OTHER_VALUES, _MOST_VALUES)
    if body.count(b",") > limit and (commas := _commas(body)) > limit:
        raise PayloadTooLarge(f"the request body has {commas} values or more; the limit is {limit}")


def _commas(body: bytes) -> int:
    """Commas outside of strings."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return sum(part.count(b",") for part in body.split(b'"')[::2])


def split_ids(body: bytes) -> tuple[bytes, int, list[int] | list[list[int]]] | None:
    """A body with token ids, without them; the id that stands for them; and them. None for any other body.

    Three times as fast as validating every id as a field; a body that is not quite right is left to that.
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
