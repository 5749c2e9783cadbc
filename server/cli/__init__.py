"""The commands of `embert`, one file each."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from embert.engine.errors import InputError

__all__ = ["encoder_options", "report_failure"]

_OPTIONS = {"labels": "label", "ignore_labels": "ignore_label"}  # arguments whose options have other names


def encoder_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that `load_encoder` and `Engine.load` take."""
    return {name: getattr(arguments, name) for name in ("device", "dtype", "encoder", "min_agreement")}


def report_failure(error: Exception) -> None:
    """Write one line to standard error. A file error has the file's name and the reason, without the errno.

    An argument of the engine is named as its option: `top_n` is --top-n.
    """
    message = str(error)
    if isinstance(error, InputError):
        name = error.param.partition("[")[0]
        option = "--" + _OPTIONS.get(name, name).replace("_", "-")
        named = [] if error.param == "texts" else [f"{option}:" if error.subject else option]
        message = " ".join(filter(None, (*named, error.subject, error.reason)))
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        message = f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    sys.stderr.write(f"embert: error: {message}\n")
