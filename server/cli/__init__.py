"""The commands of `embert`, one file each."""

from __future__ import annotations

import argparse
import sys
from typing import Any

__all__ = ["encoder_options", "report_failure"]


def encoder_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that `load_encoder` and `Engine.load` take."""
    return {name: getattr(arguments, name) for name in ("device", "dtype", "encoder", "min_agreement")}


def report_failure(error: Exception) -> None:
    """Write one line to standard error. A file error has the file's name and the reason, without the errno."""
    message = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        message = f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    sys.stderr.write(f"embert: error: {message}\n")
