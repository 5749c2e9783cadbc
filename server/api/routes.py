"""The table of routes. Whatever depends on which routes there are is made from it.

That is: the ASGI app, the OpenAPI document, metric labels, the dialect of errors, what needs no key, and the text of
`GET /`. The tests hold docs/api.md against it. A new task is a row here, and a file in dialects/.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from fastapi import Response
from pydantic import BaseModel

from embert.engine import Model
from embert.engine.tasks import NO_TASK, Task
from embert.server.api.dialects import cohere, openai, pooling, rerank, tei, tei_pairs, vertex, vllm
from embert.server.api.input.request_body import RequestBody
from embert.server.api.operations import Health, Operations, Readiness
from embert.server.api.request_context import Handler, RequestContext
from embert.server.http.errors import Dialect, Dialects

__all__ = [
    "DIALECTS",
    "METRIC_LABELS",
    "METRIC_ROUTES",
    "OPERATIONS",
    "PROBES",
    "ROUTES",
    "TASKS",
    "Operation",
    "Route",
    "TaskRoute",
    "keyless_paths",
    "tasks_by_path",
]

COHERE, OPENAI, TEI = Dialect.COHERE, Dialect.OPENAI, Dialect.TEI
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What all rows have."""

    method: ClassVar[str]
    path: str  # and its label in metrics; `{id}` stands for anything
    aliases: tuple[str, ...] = ()  # other paths of the same; each has a label of its own
    dialect: Dialect  # of errors
    summary: str

    @property
    def paths(self) -> tuple[str, ...]:
        """All of them."""
        return self.path, *self.aliases

    @property
    def name(self) -> str:
        """Method and path: the title of its section in docs/api.md."""
        return f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRoute(Route):
    """`POST`: work for an engine or the tokenizer, in plain ASGI."""

    method: ClassVar[str] = "POST"
    handler: Handler
    request: type[RequestBody]
    answer: type[BaseModel]
    example: Mapping[str, Any]
    needs: Task = NO_TASK  # tasks that the model must have, whatever the request says
    needs_one: Task = NO_TASK  # ... and of these at least one; the request says which
    reranks: bool = False  # the model must be a classifier of one label
    also: tuple[str, ...] = ()  # the paths of other rows, whose requests it takes too
    raw: bool = False  # `Accept: application/octet-stream` gets raw float32 rows

    def suits(self, model: Model) -> bool:
        """Whether the model has the tasks."""
        classifier = model.heads.classifier
        reranks = classifier is not None and len(classifier.labels) == 1
        has = model.tasks
        return not self.needs & ~has and bool(self.needs_one & has or not self.needs_one) and reranks >= self.reranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Route):
    """`GET`: an endpoint of FastAPI's."""

    method: ClassVar[str] = "GET"
    endpoint: Callable[..., Awaitable[Any]] | None  # a method of Operations; None: FastAPI has the route by itself
    keyless: str | None = None  # the value of --keyless with which it needs no key
    files: tuple[str, ...] = ()  # what it loads; needs a key only where the route does
    errors: Mapping[int, str] = field(default_factory=dict)  # status → description
    responses: Mapping[int | str, dict[str, Any]] = field(default_factory=dict)  # FastAPI's
    options: Mapping[str, Any] = field(default_factory=dict)  # others of FastAPI's


_NO_KEY = {401: "No key or a wrong one"}
_TEXT = {"schema": {"type": "string"}}

# Of these each model has one of several rows: see tasks_by_path.
_BY_MODEL = ("/", "/invocations")


async def _vertex(context: RequestContext) -> tuple[bytes, bytes]:
    """`POST /vertex`: every instance as a request of `POST /`. A reranker's may be classified, too, as TEI has it."""
    rows = tasks_by_path(context.service.model)

    def handler_of(instance: Mapping[str, Any]) -> Handler:
        row = rows["/"]
        if row.reranks and "inputs" in instance:
            row = rows["/predict"]
        context.service.check_tasks(row.needs, reranks=row.reranks)
        return row.handler

    return await vertex.answer_instances(context, handler_of)


TASKS = (
    TaskRoute(
        path="/v1/embeddings",
        aliases=("/embeddings", "/openai/deployments/{name}/embeddings"),
        dialect=OPENAI,
        summary="Embeddings, OpenAI's way",
        handler=openai.embeddings,
        request=openai.EmbeddingsRequest,
        answer=openai.EmbeddingList,
        example={"input": "Hello, world"},
        needs_one=Task.EMBED | Task.SPARSE | Task.MULTI,
        raw=True,
    ),
    TaskRoute(
        path="/pooling",
        dialect=OPENAI,
        summary="Vectors or classes, vLLM's way",
        handler=pooling.pooling,
        request=pooling.PoolingRequest,
        answer=pooling.PoolingList,
        example={"input": "Hello, world"},
        needs_one=Task.EMBED | Task.TOKENS | Task.CLASSIFY | Task.MULTI,
        raw=True,
    ),
    TaskRoute(
        path="/embed",
        dialect=TEI,
        summary="Embeddings, TEI's way",
        handler=tei.embed,
        request=tei.EmbedRequest,
        answer=tei.Vectors,
        example={"inputs": ["Hello, world"]},
        needs=Task.EMBED,
        raw=True,
    ),
    TaskRoute(
        path="/",
        aliases=("/invocations",),
        dialect=TEI,
        summary="What the model is for: `/embed` or `/similarity`, where it embeds",
        handler=tei.embed_or_similarity,
        request=tei.EmbedRequest,
        answer=tei.Vectors,
        example={"inputs": ["Hello, world"]},
        needs=Task.EMBED,
        also=("/similarity",),
        raw=True,
    ),
    TaskRoute(
        path="/embed_sparse",
        aliases=_BY_MODEL,
        dialect=TEI,
        summary="Sparse vectors",
        handler=tei.embed_sparse,
        request=tei.EmbedSparseRequest,
        answer=tei.SparseVectors,
        example={"inputs": "Hello, world"},
        needs=Task.SPARSE,
    ),
    TaskRoute(
        path="/embed_all",
        aliases=_BY_MODEL,
        dialect=TEI,
        summary="A vector for every token",
        handler=tei.embed_all,
        request=tei.EmbedAllRequest,
        answer=tei.TokenVectors,
        example={"inputs": "Hello, world"},
        needs_one=Task.TOKENS | Task.MULTI,
        raw=True,
    ),
    TaskRoute(
        path="/similarity",
        dialect=TEI,
        summary="Cosine of one text with others",
        handler=tei.similarity,
        request=tei.SimilarityRequest,
        answer=tei.Similarities,
        example={"inputs": {"source_sentence": "a cat", "sentences": ["a kitten", "a car"]}},
        needs=Task.EMBED,
    ),
    TaskRoute(
        path="/rerank",
        aliases=_BY_MODEL,
        dialect=TEI,
        summary="Texts by their relevance to a query, TEI's way, vLLM's or Infinity's",
        handler=tei_pairs.rerank,
        request=tei_pairs.RerankRequest,
        answer=tei_pairs.Ranks,
        example={"query": "a cat", "texts": ["a car", "a kitten"]},
        needs=Task.CLASSIFY,
        reranks=True,
    ),
    TaskRoute(
        path="/v1/rerank",
        dialect=COHERE,
        summary="Documents by their relevance to a query, as Cohere's v1, Jina, vLLM and Infinity have it",
        handler=rerank.rerank,
        request=rerank.RerankDocumentsRequest,
        answer=rerank.Reranked,
        example={"query": "a cat", "documents": ["a car", {"text": "a kitten"}]},
        needs=Task.CLASSIFY,
        reranks=True,
    ),
    TaskRoute(
        path="/v2/rerank",
        dialect=COHERE,
        summary="Documents by their relevance to a query, Cohere's way",
        handler=cohere.rerank,
        request=cohere.CohereRerankRequest,
        answer=cohere.CohereRanking,
        example={"query": "a cat", "documents": ["a car", "a kitten"]},
        needs=Task.CLASSIFY,
        reranks=True,
    ),
    TaskRoute(
        path="/score",
        aliases=("/v1/score",),
        dialect=OPENAI,
        summary="Scores of pairs of texts, vLLM's way",
        handler=vllm.score,
        request=vllm.ScoreRequest,
        answer=vllm.Scores,
        example={"queries": "a cat", "documents": ["a car", "a kitten"]},
        needs=Task.CLASSIFY,
        reranks=True,
    ),
    TaskRoute(
        path="/predict",
        aliases=_BY_MODEL,
        dialect=TEI,
        summary="Labels of texts, or of pairs of texts, TEI's way",
        handler=tei_pairs.predict,
        request=tei_pairs.PredictRequest,
        answer=tei_pairs.Predictions,
        example={"inputs": [["I like it"], ["a cat", "a kitten"]]},
        needs=Task.CLASSIFY,
    ),
    TaskRoute(
        path="/classify",
        dialect=OPENAI,
        summary="Labels of texts, vLLM's way",
        handler=vllm.classify,
        request=vllm.ClassifyRequest,
        answer=vllm.Classes,
        example={"input": ["I like it", "I do not"]},
        needs=Task.CLASSIFY,
    ),
    TaskRoute(
        path="/tokenize",
        dialect=TEI,
        summary="Texts to tokens",
        handler=tei.tokenize,
        request=tei.TokenizeRequest,
        answer=tei.Tokens,
        example={"inputs": "Hello, world"},
    ),
    TaskRoute(
        path="/decode",
        dialect=TEI,
        summary="Token ids to texts",
        handler=tei.decode,
        request=tei.DecodeRequest,
        answer=tei.Texts,
        example={"ids": [101, 7592, 102]},
    ),
    TaskRoute(
        path="/vertex",
        dialect=TEI,
        summary="Several requests of `POST /`, Vertex AI's way",
        handler=_vertex,
        request=vertex.VertexRequest,
        answer=vertex.VertexPredictions,
        example={"instances": [{"inputs": "Hello, world"}]},
    ),
)

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

ROUTES: tuple[TaskRoute | Operation, ...] = (*TASKS, *OPERATIONS)


class _ByPath(dict[str, ValueT]):
    """A value for every path that there can be: by route, else by how the path begins, else `rest`."""

    def __init__(self, values: Mapping[str, ValueT], rest: ValueT, prefixes: Mapping[str, ValueT]) -> None:
        super().__init__(values)
        self._patterns = [(*_ends(path), value) for path, value in values.items() if "{" in path]
        self._prefixes, self._rest = prefixes, rest

    def __missing__(self, path: str) -> ValueT:
        for begin, end, value in self._patterns:
            if path.startswith(begin) and path.endswith(end) and len(path) > len(begin) + len(end):
                return value
        return next((value for prefix, value in self._prefixes.items() if path.startswith(prefix)), self._rest)


def _ends(pattern: str) -> tuple[str, str]:
    """What stands before `{id}`, and what after it."""
    begin, _, rest = pattern.partition("{")
    return begin, rest.partition("}")[2]


_OTHER = "other"
_DIALECT_BY_PATH = {path: route.dialect for route in ROUTES for path in route.paths}
# All values of the label `route`: what clients send must not make labels.
METRIC_ROUTES = (*_DIALECT_BY_PATH, _OTHER)
METRIC_LABELS: Mapping[str, str] = _ByPath({path: path for path in _DIALECT_BY_PATH}, _OTHER, {})
# A path below these that is no route is a mistake of one of OpenAI's clients, or of Cohere's.
DIALECTS: Dialects = _ByPath(_DIALECT_BY_PATH, TEI, {"/v1/": OPENAI, "/openai/": OPENAI, "/v2/": COHERE})


def tasks_by_path(model: Model) -> dict[str, TaskRoute]:
    """The row of every path of TASKS. Of a path in several rows, the first that suits the model, else the first."""
    found: dict[str, TaskRoute] = {}
    for row in TASKS:
        for path in row.paths:
            if path not in found or (row.suits(model) and not found[path].suits(model)):
                found[path] = row
    return found


def keyless_paths(groups: Iterable[str]) -> frozenset[str]:
    """The paths that need no key for GET, with these values of --keyless."""
    wanted = [route for route in OPERATIONS if route.keyless in set(groups)]
    return frozenset(path for route in wanted for path in (*route.paths, *route.files))


PROBES = keyless_paths(("probes",))
