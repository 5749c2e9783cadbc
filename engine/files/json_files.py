"""Reads a model folder's JSON files, with errors that name the file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from embert.engine.errors import BrokenModel

__all__ = ["read_json", "read_object"]

# A lone surrogate: half of a character beyond 16 bits. UTF-8 cannot encode it, so logs and responses cannot hold it.
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(path: Path) -> Any:
    """Parse a file. Raises BrokenModel if it cannot be read or is not JSON."""
    try:
        content = path.read_bytes()
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
