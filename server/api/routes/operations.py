"""The operations: health, what is served, metrics, and the pages about all of it."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import Response

from embert.server.api.operations import Health, Operations, Readiness
from embert.server.api.routes.row import Operation
from embert.server.http.errors import Dialect

__all__ = ["OPERATIONS", "PROBES", "keyless_paths"]

OPENAI, TEI = Dialect.OPENAI, Dialect.TEI

_NO_KEY = {401: "No key or a wrong one"}
_TEXT = {"schema": {"type": "string"}}

OPERATIONS = (
    Operation(
        path="/",
        dialect=TEI,
        summary="A page for browsers; a few lines of text for others",
        endpoint=Operations.front,
        keyless="page",  # which asks for a key itself
        responses={200: {"content": {"text/html": _TEXT, "text/plain": _TEXT}}},
    ),
    Operation(
        path="/health",
        aliases=("/ping",),
        dialect=TEI,
        summary="Does inference work?",
        endpoint=Operations.health,
        keyless="probes",
        responses={200: {"model": Health}, 503: {"model": Health}},
    ),
    Operation(
        path="/livez",
        dialect=TEI,
        summary="Does this process answer?",
        endpoint=Operations.livez,
        keyless="probes",
    ),
    Operation(
        path="/readyz",
        dialect=TEI,
        summary="Are requests taken?",
        endpoint=Operations.readyz,
        keyless="probes",
        responses={200: {"model": Readiness}, 503: {"model": Readiness}},
    ),
    Operation(
        path="/info",
        dialect=TEI,
        summary="What is served, and its limits",
        endpoint=Operations.info,
        errors=_NO_KEY,
    ),
    Operation(
        path="/v1/models",
        dialect=OPENAI,
        summary="The one model served here",
        endpoint=Operations.models,
        errors=_NO_KEY,
    ),
    Operation(
        path="/v1/models/{id}",
        dialect=OPENAI,
        summary="The model, by name or id",
        endpoint=Operations.model_card,
        errors={404: "Another model", **_NO_KEY},
    ),
    Operation(
        path="/metrics",
        dialect=TEI,
        summary="Prometheus metrics",
        endpoint=Operations.metrics,
        keyless="metrics",
        errors=_NO_KEY,
        responses={200: {"content": {"text/plain": _TEXT}}},
        options={"response_class": Response},
    ),
    Operation(
        path="/docs",
        dialect=TEI,
        summary="Every route, as an interactive page",
        endpoint=None,
        keyless="docs",
        files=tuple(
            f"/static-offline-docs/{name}" for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")
        ),
    ),
    Operation(
        path="/openapi.json",
        dialect=TEI,
        summary="The document behind that page",
        endpoint=None,
        keyless="docs",
    ),
)


def keyless_paths(groups: Iterable[str]) -> frozenset[str]:
    """The paths that need no key for GET, with these values of --keyless."""
    wanted = [route for route in OPERATIONS if route.keyless in set(groups)]
    return frozenset(path for route in wanted for path in (*route.paths, *route.files))


PROBES = keyless_paths(("probes",))
