"""A model folder's JSON files: reads them, and gives a verdict on each key: honored, irrelevant, or refused by name.

Each kind of file has a table of keys. Readers check a file against its table, so that no key is ignored silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any

from embert.engine.errors import BrokenModel, UnsupportedModel

# tokenizer.json holds a vocabulary: the largest ones have 35 MB.
MOST_BYTES, MOST_TOKENIZER_BYTES = 10_000_000, 250_000_000

# A lone surrogate: half of a character beyond 16 bits. UTF-8 cannot encode it, so logs and responses cannot hold it.
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(path: Path) -> Any:
    """Parse a file. Raises BrokenModel if it cannot be read, is not JSON, or has more bytes than files of its kind."""
    most = MOST_TOKENIZER_BYTES if path.name == "tokenizer.json" else MOST_BYTES
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise BrokenModel(f"{path} has more than {most} bytes")
        value = json.loads(content)
        if SURROGATE.search(content):
            json.dumps(value, ensure_ascii=False).encode()
    except OSError as error:
        raise BrokenModel(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeEncodeError:
        raise BrokenModel(f"{path} is not valid JSON: it has a lone surrogate") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
        raise BrokenModel(f"{path} is not valid JSON: {error}") from error
    except RecursionError:
        raise BrokenModel(f"{path} is not valid JSON: it is nested too deeply") from None
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Parse a file that must hold one JSON object. Raises BrokenModel."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise BrokenModel(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def read_optional(path: Path) -> dict[str, Any]:
    """Reads like `read_object`; an empty object if the file does not exist."""
    return read_object(path) if path.is_file() else {}


def inside(source: Path, name: str) -> Path:
    """Return the path of a file or folder by the `name` that the file `source` gives it, relative to its own folder.

    Links are followed: the hub's cache consists of them. Raises BrokenModel for a name that leads out of the folder.
    """
    relative = PurePath(name)
    if relative.is_absolute() or ".." in relative.parts or "\0" in name:
        raise BrokenModel(f"{source} names {name!r}, which is not in its folder")
    return source.parent / relative


def positive_int(path: Path, fields: Mapping[str, Any], name: str) -> int | None:
    """A field of a file; None where it is null or absent. Raises BrokenModel for any other value."""
    value = fields.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise BrokenModel(f"{path}: {name} must be a positive int, found {value!r}")
    return value


def architectures_of(fields: Mapping[str, Any]) -> list[str]:
    """The classes that a config.json names in `architectures`."""
    value = fields.get("architectures")
    return [str(name) for name in value] if isinstance(value, list) else []


class Verdict(StrEnum):
    """The engine's treatment of a key."""

    HONORED = "honored"  # same effect as in the library that writes the file, or the value is refused
    IRRELEVANT = "irrelevant"  # no value changes a vector, a score or a token
    REFUSED = "refused"  # values that change nothing are accepted, others are an error that names the key


@dataclass(frozen=True, slots=True)
class Key:
    """Row of a table of keys."""

    verdict: Verdict
    note: str  # its effect here; why it is irrelevant; or the effect that is not supported
    accepted: tuple[object, ...] = ()  # of a refused key: the values that change nothing


Table = Mapping[str, Key]


def honored(note: str) -> Key:
    """A row of a key that a reader reads."""
    return Key(Verdict.HONORED, note)


def irrelevant(reason: str) -> Key:
    """A row of a key that changes nothing."""
    return Key(Verdict.IRRELEVANT, reason)


def refused(note: str, *accepted: object) -> Key:
    """A row of a key whose other values than `accepted` are an error."""
    return Key(Verdict.REFUSED, note, accepted)


def check_keys(path: Path, fields: Mapping[str, Any], table: Table) -> tuple[str, ...]:
    """Check a file's keys against its table. Returns a sentence for the start-up log where some are unknown.

    Raises UnsupportedModel for a refused key, naming the file, the key, its value and the values that are accepted.
    """
    for name, value in fields.items():
        key = table.get(name)
        if key is not None and key.verdict is Verdict.REFUSED and not any(_is(value, item) for item in key.accepted):
            supported = ", ".join(map(repr, key.accepted)) or "none of its values"
            raise UnsupportedModel(f"{path}: {name} {value!r} is not supported ({key.note}); supported: {supported}")
    unknown = [name for name in fields if name not in table]
    if not unknown:
        return ()
    return (f"{path}: unknown keys, which are ignored and may change vectors: {', '.join(unknown)}",)


def _is(value: object, accepted: object) -> bool:
    """Equal, and true is not 1."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)
