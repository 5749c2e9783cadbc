"""Checks the errors of all APIs."""

from __future__ import annotations

from collections.abc import Iterable

import httpx


def message(response: httpx.Response) -> str:
    """The message of an error, in the form of any API."""
    body = response.json()
    if "message" in body:
        assert body.keys() == {"id", "message"}
        return str(body["message"])
    if "error_type" in body:
        assert body.keys() == {"error", "error_type"}
        return str(body["error"])
    if "detail" in body:
        assert body.keys() == {"detail"}
        return str(body["detail"] if isinstance(body["detail"], str) else body["detail"][0]["msg"])
    assert body.keys() == {"error"}
    if response.request.url.path.startswith("/api/"):
        return str(body["error"])
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return str(body["error"]["message"])


def check_refused(response: httpx.Response, status: int, words: Iterable[str]) -> None:
    """Checks the status, and that the message has all `words`."""
    found = message(response)
    assert response.status_code == status, found
    for word in words:
        assert word in found, found
