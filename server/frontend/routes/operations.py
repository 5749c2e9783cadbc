"""The operations: health, what is served, metrics, and the pages about all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fastapi import Response

from embert.server.frontend.operations import Health, Operations, Readiness
from embert.server.frontend.routes.route import Operation
from embert.server.http.errors import Dialect

__all__ = ["OPERATIONS", "keyless_paths"]

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
        path="/readyz/{name}",
        dialect=TEI,
        summary="Are requests for one of the models taken?",
        endpoint=Operations.readyz_of,
        keyless="probes",
        errors={404: "Another model"},
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
        path="/models/{name}/info",
        dialect=TEI,
        summary="The same of one of the models",
        endpoint=Operations.info_of,
        errors={404: "Another model", **_NO_KEY},
    ),
    Operation(
        path="/v1/models",
        dialect=OPENAI,
        summary="The models served here",
        endpoint=Operations.models,
        errors=_NO_KEY,
    ),
    Operation(
        path="/v1/models/{id}",
        dialect=OPENAI,
        summary="A model, by name or id",
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


def keyless_paths(groups: Iterable[str], models: Iterable[str] = ()) -> frozenset[str]:
    """The paths that need no key for GET, with these values of --keyless; `models` are the names in paths."""
    names, values = tuple(models), set(groups)
    wanted = [route for route in OPERATIONS if route.keyless in values]
    return frozenset(
        each for route in wanted for path in (*route.paths, *route.files) for each in _with_names(path, names)
    )


def _with_names(path: str, names: tuple[str, ...]) -> Iterator[str]:
    begin, brace, rest = path.partition("{")
    yield from (begin + name + rest.partition("}")[2] for name in names) if brace else (path,)
