"""The commands of `embert`, one file each."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from embert.engine.errors import ModelError

__all__ = ["encoder_options", "report_failure"]


def encoder_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that `load_encoder` and `Engine.load` take."""
    return {name: getattr(arguments, name) for name in ("device", "dtype", "encoder", "min_agreement")}


def report_failure(error: Exception) -> None:
    """Write one line to standard error. A file error has the file's name and the reason, without the errno.

    Where the message names an argument of the engine, the line names the option: `top_n` is --top-n.
    """
    message = str(error)
    if not isinstance(error, ModelError):  # whose names are those of the model's files
        message = re.sub(r"`labels(\[\d+\])?`", "--label", message.removeprefix("`texts`: "))
        message = re.sub(r"`([a-z_]+)`", lambda argument: "--" + argument[1].replace("_", "-"), message)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        message = f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    sys.stderr.write(f"embert: error: {message}\n")
