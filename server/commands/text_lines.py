"""The texts that a command is given: words of the command line, or the lines of a file."""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from embert.server.commands.embed_output import OutputError

__all__ = ["TextLines"]


class TextLines:
    """The texts, one by one, and a digest of those taken so far."""

    def __init__(self, texts: Sequence[str], file: str | None, stack: ExitStack) -> None:
        """`texts` themselves, or the lines of `file`, which `stack` closes. Raises OSError if it cannot be read."""
        self._name = "standard input" if file == "-" else file
        self._hash = hashlib.sha256()
        self._taken = 0
        self._lines: Iterator[bytes | str]
        if file is None:
            self._lines = iter(texts)
        elif file == "-":
            self._lines = iter(sys.stdin.buffer)  # bytes: it is UTF-8 under any locale
        else:
            self._lines = stack.enter_context(Path(file).open("rb"))  # noqa: SIM115 - the stack closes it

    @property
    def digest(self) -> str:
        """SHA-256 of the texts taken so far."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self._taken += 1
        if isinstance(line, str):
            return line
        line = line.rstrip(b"\r\n")
        self._hash.update(line + b"\n")
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise OutputError(
                f"{self._name} line {self._taken} is not UTF-8: byte {line[error.start]:#04x} at position "
                f"{error.start + 1}"
            ) from None

    def skip(self, texts: int, digest: str) -> None:
        """Skip the completed texts. Raises OutputError where they are not the ones that were embedded."""
        for _ in itertools.islice(self, texts):
            pass
        if texts and (self._taken != texts or self.digest != digest):
            raise OutputError(
                f"cannot resume: the first {texts} lines of {self._name} are not those that were embedded; "
                "leave --resume out to begin anew"
            )
