"""The commands of `embert`, one file each."""

from __future__ import annotations

import sys

__all__ = ["report_failure"]


def report_failure(error: Exception) -> None:
    """Write one line to standard error. A file error has the file's name and the reason, without the errno."""
    message = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        message = f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    sys.stderr.write(f"embert: error: {message}\n")
