"""The bodies in which benchmarks.server.targets sends a group of texts, one for each kind of answer or server."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.lib.load_plan import Request, post
from benchmarks.lib.texts import Text

__all__ = ["base64", "floats", "infinity"]


def base64(group: Sequence[Text]) -> Request:
    """Ask for base64 on OpenAI's route."""
    return _post("/v1/embeddings", {"input": _inputs(group), "encoding_format": "base64"}, group)


def floats(group: Sequence[Text]) -> Request:
    """Ask for JSON floats on TEI's route, which plain FastAPI has too."""
    return _post("/embed", {"inputs": _inputs(group)}, group)


def infinity(group: Sequence[Text]) -> Request:
    """Ask Infinity for JSON floats."""
    return _post("/embeddings", {"model": "bench", "input": _inputs(group)}, group)


def _inputs(group: Sequence[Text]) -> list[str]:
    return [text.text for text in group]


def _post(path: str, body: object, group: Sequence[Text]) -> Request:
    return post(path, body, kind="text", texts=len(group), tokens=sum(text.tokens for text in group))
