"""Files that survive the end of the process, at any moment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from embert.server.bulk.job import BulkError, CannotResume

__all__ = ["check_facts", "plain", "replace_json", "sync_folder", "write_at"]

PIECE_BYTES = 256 << 10  # written at once: for more, the system may look a long time for memory in one piece


def write_at(descriptor: int, content: bytes | memoryview, position: int, path: Path) -> None:
    """Write bytes at a position. Raises BulkError, with the file's name, where there is no room or no permission."""
    view = memoryview(content)
    try:
        while view:
            count = os.pwrite(descriptor, view[:PIECE_BYTES], position)
            view, position = view[count:], position + count
    except OSError as error:
        raise BulkError(f"{path} cannot be written: {error.strerror}") from None


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that is there as a whole, old or new. Raises OSError."""
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("wb") as file:
            file.write(orjson.dumps(content, option=orjson.OPT_INDENT_2))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Make new names in a folder last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives them back."""
    read: dict[str, Any] = orjson.loads(orjson.dumps(facts))
    return read


def check_facts(made_with: Mapping[str, Any], facts: Mapping[str, Any], where: Path) -> None:
    """Raise CannotResume where what is complete was made from other facts."""
    now = plain(facts)
    for name in {**made_with, **now}:
        before, after = made_with.get(name), now.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            changed = sorted(key for key in {**before, **after} if before.get(key) != after.get(key))
            if changed:
                raise CannotResume(f"{name} have changed since {where} was begun: {', '.join(changed)}")
        elif before != after:
            raise CannotResume(f"{name} was {before!r} in {where}, and is {after!r}")
