"""English sentences that are on every machine: those of the manual that comes with Python."""

from __future__ import annotations

import re
from pydoc_data.topics import topics

__all__ = ["english"]


def english(count: int) -> list[str]:
    """So many different sentences of 60 to 300 characters, in the manual's order."""
    found: dict[str, None] = {}
    for text in topics.values():
        for paragraph in re.split(r"\n\s*\n", text):
            for sentence in re.split(r"(?<=[.!?]) +", " ".join(paragraph.split())):
                if re.fullmatch(r"[A-Z][a-z]* .{60,300}\.", sentence):
                    found[sentence] = None
    if len(found) < count:
        raise ValueError(f"there are {len(found)} sentences, {count} were asked for")
    return list(found)[:count]
