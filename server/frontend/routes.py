"""The table of all routes, and the values that follow from it for every path.

A task's route asks an engine or the tokenizer for work; an operation is about the server itself. The ASGI app, the
OpenAPI document, metric labels, the form of errors, what needs no key, and the text of `GET /` come from this table.
The tests compare docs/api.md with it. A new task is a row here, and a file in ../protocols/.

The tasks' routes are also below `/models/NAME`, which names the model in the path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

from fastapi import Response
from pydantic import BaseModel

from embert.engine import Model
from embert.engine.tasks import ALL_TASKS, NO_TASK, Task
from embert.server.config import ConfigError
from embert.server.frontend.operations import Health, Operations, Readiness
from embert.server.http.errors import ErrorFormat, ErrorFormats
from embert.server.http.response import Body
from embert.server.protocols import (
    cohere,
    decisions,
    hugging_face,
    ollama,
    openai,
    rerank,
    tei,
    tei_pairs,
    tei_tokens,
    vertex,
    vllm,
)
from embert.server.protocols.request_context import Handler, RequestContext
from embert.server.registry.model_handle import Capability, ModelHandle
from embert.server.registry.model_registry import ModelRegistry
from embert.server.request.request_body import RequestBody

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Route:
    """Columns of every row."""

    method: ClassVar[str]
    path: str  # and its label in metrics; `{id}` stands for anything
    error_format: ErrorFormat  # of errors
    summary: str
    aliases: tuple[str, ...] = field(default=(), kw_only=True)  # other paths of the same; each has its own label

    @property
    def paths(self) -> tuple[str, ...]:
        return self.path, *self.aliases

    @property
    def name(self) -> str:
        """Method and path: the title of its section in docs/api.md."""
        return f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True)
class TaskRoute(Route):
    """`POST`: work for an engine or the tokenizer, served by `RequestServer`."""

    method: ClassVar[str] = "POST"
    handler: Handler
    request: type[RequestBody]
    response: type[BaseModel]
    example: Mapping[str, Any]
    example_of: Mapping[Task, Mapping[str, Any]] = field(default_factory=dict)  # more of it, by the model's first
    needs: Task = NO_TASK  # tasks that the model must have for every request
    needs_one: Task = NO_TASK  # and at least one of these; the request says which
    reranks: bool = False  # the model must be a classifier of one label, or of late interaction
    entails: bool = False  # the model must have a label of entailment
    decides: bool = False  # the model must decide
    also: tuple[str, ...] = ()  # the paths of other rows whose requests it takes too
    raw: bool = False  # `Accept: application/octet-stream` gets raw float32 rows

    def example_for(self, model: Model) -> dict[str, Any]:
        """A request that the model can serve, if it suits the row."""
        main = next((task for task in ALL_TASKS if task in model.tasks & self.needs_one), NO_TASK)
        return {**self.example, **self.example_of.get(main, {})}

    @property
    def capability(self) -> Capability:
        return Capability(self.needs, self.needs_one, self.reranks, self.entails, self.decides)

    def suits(self, model: Model) -> bool:
        return self.capability.suits(model)


@dataclass(frozen=True, slots=True)
class Operation(Route):
    """`GET`: an endpoint of FastAPI's."""

    method: ClassVar[str] = "GET"
    endpoint: Callable[..., Awaitable[Any]] | None  # a method of Operations; None: FastAPI has the route by itself
    keyless: str | None = None  # the value of --keyless with which it needs no key
    files: tuple[str, ...] = ()  # what it loads; needs a key only where the route does
    responses: Mapping[int | str, dict[str, Any]] = field(default_factory=dict)  # FastAPI's
    options: Mapping[str, Any] = field(default_factory=dict)  # others of FastAPI's

    @property
    def errors(self) -> dict[int, str]:
        """Status → description, of errors that clients cause."""
        errors = {404: "Another model"} if "{" in self.path else {}
        return errors if self.keyless in ("probes", "page") else {**errors, 401: "No key or a wrong one"}


COHERE, OLLAMA, OPENAI, TEI = ErrorFormat.COHERE, ErrorFormat.OLLAMA, ErrorFormat.OPENAI, ErrorFormat.TEI
TYPESAFE = ErrorFormat.TYPESAFE

MODELS_PREFIX = "/models/"
# Paths of several rows, of which a model has one: see tasks_by_path.
SHARED_PATHS = ("/", "/invocations")
# Without a name in the request, these use the first model, for any task.
FIRST_MODEL_PATHS = (*SHARED_PATHS, "/vertex", "/tokenize", "/detokenize", "/decode")


async def _vertex(context: RequestContext) -> tuple[bytes, bytes]:
    """`POST /vertex`: every instance as a request of `POST /`."""
    route = tasks_by_path(context.handle.model)["/"]
    context.handle.check(route.capability)
    return await vertex.predict(context, route.handler)


_TEXT = {"schema": {"type": "string"}}
SWAGGER_FOLDER = "static-offline-docs"
SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")

# fmt: off
ROUTES: tuple[TaskRoute | Operation, ...] = (
    TaskRoute(
        "/v1/embeddings", OPENAI, "Embeddings, OpenAI's way",
        openai.embeddings, openai.EmbeddingsRequest, openai.EmbeddingList, {"input": "Hello, world"},
        aliases=("/embeddings", "/openai/deployments/{name}/embeddings"),
        example_of={Task.SPARSE: {"embedding_types": ["sparse"]}, Task.MULTI: {"embedding_types": ["colbert"]}},
        needs_one=Task.EMBED | Task.SPARSE | Task.MULTI, raw=True,
    ),
    TaskRoute(
        "/pooling", OPENAI, "Vectors or classes, vLLM's way",
        vllm.pooling, vllm.PoolingRequest, vllm.PoolingList, {"input": "Hello, world"},
        needs_one=Task.EMBED | Task.TOKENS | Task.CLASSIFY | Task.MULTI | Task.TOKEN_CLASSES,
    ),
    TaskRoute(
        "/v2/embed", COHERE, "Embeddings, Cohere's way",
        cohere.embed, cohere.CohereEmbedRequest, cohere.CohereEmbeddings,
        {"texts": ["Hello, world"], "input_type": "search_document", "embedding_types": ["float"]},
        aliases=("/v1/embed",), needs=Task.EMBED,
    ),
    TaskRoute(
        "/api/embed", OLLAMA, "Embeddings, Ollama's way",
        ollama.embed, ollama.OllamaEmbedRequest, ollama.OllamaEmbeddings, {"input": "Hello, world"},
        needs=Task.EMBED,
    ),
    TaskRoute(
        "/api/embeddings", OLLAMA, "One embedding, Ollama's earlier way",
        ollama.embeddings, ollama.OllamaEmbeddingRequest, ollama.OllamaEmbedding, {"prompt": "Hello, world"},
        needs=Task.EMBED,
    ),
    TaskRoute(
        "/api/show", OLLAMA, "A model, Ollama's way",
        ollama.show, ollama.OllamaShowRequest, ollama.OllamaShow, {"model": "text-embeddings-inference"},
    ),
    TaskRoute(
        "/embed", TEI, "Embeddings, TEI's way",
        tei.embed, tei.EmbedRequest, tei.Vectors, {"inputs": ["Hello, world"]},
        needs=Task.EMBED, raw=True,
    ),
    TaskRoute(
        "/", TEI, "What the model is for: `/embed` or `/similarity`, where it embeds",
        tei.embed, tei.EmbedRequest, tei.Vectors, {"inputs": ["Hello, world"]},
        aliases=("/invocations",), needs=Task.EMBED, also=("/similarity",), raw=True,
    ),
    TaskRoute(
        "/embed_sparse", TEI, "Sparse vectors",
        tei.embed_sparse, tei.EmbedSparseRequest, tei.SparseVectors, {"inputs": "Hello, world"},
        aliases=SHARED_PATHS, needs=Task.SPARSE,
    ),
    TaskRoute(
        "/embed_all", TEI, "A vector for every token",
        tei.embed_all, tei.EmbedAllRequest, tei.TokenVectors, {"inputs": "Hello, world"},
        aliases=SHARED_PATHS, needs_one=Task.TOKENS | Task.MULTI, raw=True,
    ),
    TaskRoute(
        "/similarity", TEI, "Cosine of one text with others",
        tei.similarity, tei.SimilarityRequest, tei.Similarities,
        {"inputs": {"source_sentence": "a cat", "sentences": ["a kitten", "a car"]}},
        needs=Task.EMBED,
    ),
    TaskRoute(
        "/rerank", TEI, "Texts by their relevance to a query, TEI's way, vLLM's or Infinity's",
        tei_pairs.rerank, tei_pairs.RerankRequest, tei_pairs.Ranks, {"query": "a cat", "texts": ["a car", "a kitten"]},
        aliases=SHARED_PATHS, reranks=True,
    ),
    TaskRoute(
        "/v1/rerank", COHERE,
        "Documents by their relevance to a query, as Cohere's v1, Jina, vLLM and Infinity have it",
        rerank.rerank, rerank.RerankDocumentsRequest, rerank.Reranked,
        {"query": "a cat", "documents": ["a car", {"text": "a kitten"}]},
        reranks=True,
    ),
    TaskRoute(
        "/v2/rerank", COHERE, "Documents by their relevance to a query, Cohere's way",
        cohere.rerank, cohere.CohereRerankRequest, cohere.CohereRanking,
        {"query": "a cat", "documents": ["a car", "a kitten"]},
        reranks=True,
    ),
    TaskRoute(
        "/v1/ranking", OPENAI, "Passages by their relevance to a query, NVIDIA's way",
        rerank.ranking, rerank.RankingRequest, rerank.NvidiaRanking,
        {"query": {"text": "a cat"}, "passages": [{"text": "a car"}, {"text": "a kitten"}]},
        reranks=True,
    ),
    TaskRoute(
        "/score", OPENAI, "Scores of pairs of texts, vLLM's way",
        vllm.score, vllm.ScoreRequest, vllm.Scores, {"queries": "a cat", "documents": ["a car", "a kitten"]},
        aliases=("/v1/score",), reranks=True,
    ),
    TaskRoute(
        "/predict", TEI, "Labels of texts, or of pairs of texts, TEI's way",
        tei_pairs.predict, tei_pairs.PredictRequest, tei_pairs.Predictions,
        {"inputs": [["I like it"], ["a cat", "a kitten"]]},
        aliases=SHARED_PATHS, needs=Task.CLASSIFY,
    ),
    TaskRoute(
        "/classify", OPENAI, "Labels of texts, vLLM's way",
        vllm.classify, vllm.ClassifyRequest, vllm.Classes, {"input": ["I like it", "I do not"]},
        aliases=("/v1/classify",), needs=Task.CLASSIFY,
    ),
    TaskRoute(
        "/zero_shot", TEI, "Labels of the client's own for texts, as transformers' zero-shot pipeline",
        hugging_face.zero_shot, hugging_face.ZeroShotRequest, hugging_face.ZeroShotResponse,
        {"inputs": "I like the cat", "candidate_labels": ["animals", "taxes"]},
        needs=Task.CLASSIFY, entails=True,
    ),
    TaskRoute(
        "/token_classify", TEI, "Entities of texts, as transformers' token classification pipeline",
        hugging_face.token_classify, hugging_face.TokenClassifyRequest, hugging_face.Entities,
        {"inputs": "Angela lives in Berlin", "aggregation_strategy": "simple"},
        aliases=SHARED_PATHS, needs=Task.TOKEN_CLASSES,
    ),
    TaskRoute(
        "/v1/decisions", OPENAI, "Probabilities for the options of questions, OpenAI's way",
        decisions.decisions, decisions.DecisionsRequest, decisions.Decisions,
        {"input": "The screen is broken", "questions": [{"type": "predicate", "instructions": "An item is damaged"}]},
        decides=True,
    ),
    TaskRoute(
        "/v1/systemone", TYPESAFE, "Probabilities for the options of questions, TypeSafe's way",
        decisions.system_one, decisions.SystemOneRequest, decisions.SystemOne,
        {
            "state": "The screen is broken",
            "questions": {"damaged": {"type": "noul", "instructions": "An item is damaged"}},
        },
        aliases=("/v1/decide",), decides=True,
    ),
    TaskRoute(
        "/tokenize", TEI, "Texts to tokens, TEI's way or vLLM's",
        tei_tokens.tokenize, tei_tokens.TokenizeRequest, tei_tokens.Tokens, {"inputs": "Hello, world"},
    ),
    TaskRoute(
        "/detokenize", OPENAI, "Token ids to a text, vLLM's way",
        tei_tokens.detokenize, tei_tokens.DetokenizeRequest, tei_tokens.Detokenized, {"tokens": [101, 7592, 102]},
    ),
    TaskRoute(
        "/decode", TEI, "Token ids to texts",
        tei_tokens.decode, tei_tokens.DecodeRequest, tei_tokens.Texts, {"ids": [101, 7592, 102]},
    ),
    TaskRoute(
        "/vertex", TEI, "Several requests of `POST /`, Vertex AI's way",
        _vertex, vertex.VertexRequest, vertex.VertexPredictions, {"instances": [{"inputs": "Hello, world"}]},
    ),
    Operation(
        "/", TEI, "A page for browsers; a few lines of text for others", Operations.front,
        keyless="page", responses={200: {"content": {"text/html": _TEXT, "text/plain": _TEXT}}},
    ),
    Operation(
        "/health", TEI, "Does inference work?", Operations.health,
        aliases=("/ping",), keyless="probes", responses={200: {"model": Health}, 503: {"model": Health}},
    ),
    Operation("/livez", TEI, "Liveness of this process", Operations.livez, keyless="probes"),
    Operation(
        "/readyz", TEI, "Are requests taken?", Operations.readyz,
        keyless="probes", responses={200: {"model": Readiness}, 503: {"model": Readiness}},
    ),
    Operation(
        "/readyz/{name}", TEI, "Are requests for one of the models taken?", Operations.readyz_of,
        keyless="probes", responses={200: {"model": Readiness}, 503: {"model": Readiness}},
    ),
    Operation("/info", TEI, "What is served, and its limits", Operations.info),
    Operation("/models/{name}/info", TEI, "The same of one of the models", Operations.info_of),
    Operation("/v1/models", OPENAI, "The models served here", Operations.models),
    Operation("/v1/models/{id}", OPENAI, "A model, by name or id", Operations.model_card),
    Operation("/api/tags", OLLAMA, "The models served here, Ollama's way", Operations.ollama_models),
    Operation("/api/version", OLLAMA, "The version of this server, Ollama's way", Operations.ollama_version),
    Operation(
        "/metrics", TEI, "Prometheus metrics", Operations.metrics,
        keyless="metrics", responses={200: {"content": {"text/plain": _TEXT}}}, options={"response_class": Response},
    ),
    Operation(
        "/docs", TEI, "Every route, as an interactive page", None,
        keyless="docs", files=tuple(f"/{SWAGGER_FOLDER}/{name}" for name in SWAGGER_FILES),
    ),
    Operation("/openapi.json", TEI, "The document behind that page", None, keyless="docs"),
)
# fmt: on

TASKS = tuple(route for route in ROUTES if isinstance(route, TaskRoute))
OPERATIONS = tuple(route for route in ROUTES if isinstance(route, Operation))


def tasks_by_path(model: Model) -> dict[str, TaskRoute]:
    """The route of every path of TASKS. Of a path in several routes, the first that suits the model, else the first."""
    routes: dict[str, TaskRoute] = {}
    for route in TASKS:
        for path in route.paths:
            if path not in routes or (route.suits(model) and not routes[path].suits(model)):
                routes[path] = route
    for path in SHARED_PATHS:
        route = routes[path]
        more = {"/rerank": ("/predict",), "/predict": ("/zero_shot",)}.get(route.path, ())
        routes[path] = dataclasses.replace(route, handler=_by_body(route), also=(*route.also, *more))
    return routes


def _by_body(route: TaskRoute) -> Handler:
    """A handler of `POST /`: clients send other routes' bodies there, which `inputs` tells apart.

    An object is of `/similarity`, for any model; texts are of `/predict` to a reranker, as in TEI. A field that only
    `/zero_shot` has is looked for where the model has several labels.
    """
    has_labels = route.path == "/predict"

    async def handle(context: RequestContext) -> tuple[bytes, Body]:
        if has_labels and context.has_field("candidate_labels"):
            return await hugging_face.zero_shot(context)
        begin = context.begin_of("inputs")
        if begin == b"{":
            context.handle.check_tasks(Task.EMBED)
            return await tei.similarity(context)
        if route.reranks and begin in (b"[", b'"'):
            return await tei_pairs.predict(context)
        return await route.handler(context)

    return handle


# --- for every path: its label in metrics, its form of errors, its need of a key, and its model ---


class _ByPath(dict[str, ValueT]):
    """A value for every possible path: by route, else by how the path begins, else `rest`.

    A task's route below the name of a model counts as that route, even if there is no such model.
    """

    def __init__(
        self,
        values: Mapping[str, ValueT],
        rest: ValueT,
        prefixes: Mapping[str, ValueT],
        model_paths: Mapping[str, str],
    ) -> None:
        """`values` by route; `model_paths` is the route of each path with the name of a model that there is."""
        super().__init__(values)
        self._patterns = [(*_ends(path), value) for path, value in values.items() if "{" in path]
        self._patterns += [(MODELS_PREFIX, path, values[path]) for path in MODEL_SUFFIXES]
        self._prefixes, self._rest = prefixes, rest
        self.update({path: values[route] for path, route in model_paths.items()})

    def __missing__(self, path: str) -> ValueT:
        for begin, end, value in self._patterns:
            if path.startswith(begin) and path.endswith(end) and len(path) > len(begin) + len(end):
                return value
        return next((value for prefix, value in self._prefixes.items() if path.startswith(prefix)), self._rest)


def _ends(pattern: str) -> tuple[str, str]:
    """Splits a pattern at `{id}`."""
    begin, _, rest = pattern.partition("{")
    return begin, rest.partition("}")[2]


_OTHER = "other"
_ERROR_FORMATS = {path: route.error_format for route in ROUTES for path in route.paths}
# The longest first: `/v1/rerank` and `/rerank` have the same end.
MODEL_SUFFIXES = sorted(
    (path for route in TASKS for path in route.paths if "{" not in path and path != "/"), key=len, reverse=True
)
# All values of the label `route`: what clients send must not make labels.
METRIC_ROUTES = (*_ERROR_FORMATS, _OTHER)
METRIC_TASKS = frozenset(path for route in TASKS for path in route.paths)  # the labels of tasks


def labels_by_path(model_paths: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """The metric label of every path; `model_paths` is the route of each path that has the name of a model in it."""
    return _ByPath({path: path for path in _ERROR_FORMATS}, _OTHER, {}, model_paths or {})


def error_formats_by_path(model_paths: Mapping[str, str] | None = None) -> ErrorFormats:
    """The form of errors of every path. Unknown paths below `/v1/` are those of OpenAI clients."""
    prefixes = {"/v1/": OPENAI, "/openai/": OPENAI, "/v2/": COHERE, "/api/": OLLAMA}
    return _ByPath(_ERROR_FORMATS, TEI, prefixes, model_paths or {})


def keyless_paths(groups: Iterable[str], models: Iterable[str] = ()) -> frozenset[str]:
    """The paths that need no key for GET, with these values of --keyless; `models` are the names in paths."""
    values = set(groups)
    paths = {path for route in OPERATIONS if route.keyless in values for path in (*route.paths, *route.files)}
    patterns = [_ends(path) for path in paths if "{" in path]
    model_paths = {begin + name + end for name in models for begin, end in patterns}
    return frozenset(model_paths.union(path for path in paths if "{" not in path))


class ModelPath(NamedTuple):
    """A route below the name of a model."""

    handle: ModelHandle
    name: str
    path: str  # without the name
    route: TaskRoute


def model_paths(registry: ModelRegistry) -> dict[str, ModelPath]:
    """All of them. Raises ConfigError if one name is another name followed by a part of a route."""
    paths: dict[str, ModelPath] = {}
    for name, handle in registry.by_name.items():
        for path, entry in _paths(name, handle):
            other = paths.setdefault(path, entry)
            if other.handle is not handle:
                raise ConfigError(
                    f"the models {other.name!r} and {name!r} would have the same path {path}; give one of them another "
                    "name, as in NAME=MODEL"
                )
    return paths


def _paths(name: str, handle: ModelHandle) -> Iterator[tuple[str, ModelPath]]:
    for path, route in tasks_by_path(handle.model).items():
        if "{" in path:
            continue
        entry = ModelPath(handle, name, path, route)
        yield MODELS_PREFIX + name + path, entry
        if path == "/":
            yield MODELS_PREFIX + name, entry
