"""What a value in a request is, for an error: never a text."""

from __future__ import annotations

from typing import Any

__all__ = ["describe", "describe_name"]


def describe_name(name: str) -> str:
    """A name that a client gave, for an error: as it is, unless it looks more like a text."""
    return repr(name) if len(name) <= 100 and name.isprintable() else describe(name)


def describe(value: Any) -> str:
    """What a value is, without giving away a text."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value) if abs(value) < 1e18 else "not a number of any use"
        case str():
            return f"a string of {len(value)} characters"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case _:
            return "an object"
