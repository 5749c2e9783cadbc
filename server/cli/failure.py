"""What a command says of a failure before it ends with status 1."""

from __future__ import annotations

import sys

__all__ = ["report_failure"]


def report_failure(error: Exception) -> None:
    """One line on standard error. Of a file it says which one and what is wrong, without the system's number."""
    said = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        said = f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    sys.stderr.write(f"embert: error: {said}\n")
