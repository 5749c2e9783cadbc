"""Reads a model folder's JSON files, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from embert.engine.errors import BrokenModel

__all__ = ["read_json", "read_object"]


def read_json(path: Path) -> Any:
    """Parse a file. Raises BrokenModel if it cannot be read or is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise BrokenModel(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
        raise BrokenModel(f"{path} is not valid JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Parse a file that must hold one JSON object. Raises BrokenModel."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise BrokenModel(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value
