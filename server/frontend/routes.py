"""The tables' rows, and the table of the tasks: routes that want work of an engine or of the tokenizer.

Everything that depends on the list of routes is derived from this table and that of operations.py: the ASGI app, the
OpenAPI document, metric labels, the form of errors, what needs no key, and the text of `GET /`. The tests compare
docs/api.md with it. A new task is a row here, and a file in ../protocols/.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel

from embert.engine import Model
from embert.engine.tasks import ALL_TASKS, NO_TASK, Task
from embert.server.http.errors import ErrorFormat
from embert.server.protocols import cohere, nvidia, openai, pooling, rerank, tei, tei_pairs, tei_tokens, vertex, vllm
from embert.server.request.model_handle import Capability
from embert.server.request.request_body import RequestBody
from embert.server.request.request_context import Handler, RequestContext

__all__ = ["BY_MODEL", "OF_THE_FIRST", "TASKS", "Operation", "Route", "TaskRoute", "tasks_by_path"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What all rows have."""

    method: ClassVar[str]
    path: str  # and its label in metrics; `{id}` stands for anything
    aliases: tuple[str, ...] = ()  # other paths of the same; each has a label of its own
    error_format: ErrorFormat  # of errors
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
    example_of: Mapping[Task, Mapping[str, Any]] = field(default_factory=dict)  # more of it, by the model's first
    needs: Task = NO_TASK  # tasks that the model must have for every request
    needs_one: Task = NO_TASK  # and at least one of these; the request says which
    reranks: bool = False  # the model must be a classifier of one label
    also: tuple[str, ...] = ()  # the paths of other rows whose requests it takes too
    raw: bool = False  # `Accept: application/octet-stream` gets raw float32 rows

    def example_for(self, model: Model) -> dict[str, Any]:
        """A request that the model can answer, if it suits the row."""
        main = next((task for task in ALL_TASKS if task in model.tasks & self.needs_one), NO_TASK)
        return {**self.example, **self.example_of.get(main, {})}

    @property
    def capability(self) -> Capability:
        """What a model must be able to do."""
        return Capability(self.needs, self.needs_one, self.reranks)

    def suits(self, model: Model) -> bool:
        """Whether the model has the tasks."""
        return self.capability.suits(model)


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


COHERE, OPENAI, TEI = ErrorFormat.COHERE, ErrorFormat.OPENAI, ErrorFormat.TEI

# Of these each model has one of several rows: see tasks_by_path.
BY_MODEL = ("/", "/invocations")
# Without a name in the request, these use the first model, for any task.
OF_THE_FIRST = (*BY_MODEL, "/vertex", "/tokenize", "/detokenize", "/decode")


async def _vertex(context: RequestContext) -> tuple[bytes, bytes]:
    """`POST /vertex`: every instance as a request of `POST /`."""
    route = tasks_by_path(context.handle.model)["/"]
    context.handle.served.check_tasks(route.needs, reranks=route.reranks)
    return await vertex.answer_instances(context, route.handler)


TASKS = (
    TaskRoute(
        path="/v1/embeddings",
        aliases=("/embeddings", "/openai/deployments/{name}/embeddings"),
        error_format=OPENAI,
        summary="Embeddings, OpenAI's way",
        handler=openai.embeddings,
        request=openai.EmbeddingsRequest,
        answer=openai.EmbeddingList,
        example={"input": "Hello, world"},
        example_of={Task.SPARSE: {"embedding_types": ["sparse"]}, Task.MULTI: {"embedding_types": ["colbert"]}},
        needs_one=Task.EMBED | Task.SPARSE | Task.MULTI,
        raw=True,
    ),
    TaskRoute(
        path="/pooling",
        error_format=OPENAI,
        summary="Vectors or classes, vLLM's way",
        handler=pooling.pooling,
        request=pooling.PoolingRequest,
        answer=pooling.PoolingList,
        example={"input": "Hello, world"},
        needs_one=Task.EMBED | Task.TOKENS | Task.CLASSIFY | Task.MULTI,
        raw=True,
    ),
    TaskRoute(
        path="/v2/embed",
        aliases=("/v1/embed",),
        error_format=COHERE,
        summary="Embeddings, Cohere's way",
        handler=cohere.embed,
        request=cohere.CohereEmbedRequest,
        answer=cohere.CohereEmbeddings,
        example={"texts": ["Hello, world"], "input_type": "search_document", "embedding_types": ["float"]},
        needs=Task.EMBED,
    ),
    TaskRoute(
        path="/embed",
        error_format=TEI,
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
        error_format=TEI,
        summary="What the model is for: `/embed` or `/similarity`, where it embeds",
        handler=tei.embed,
        request=tei.EmbedRequest,
        answer=tei.Vectors,
        example={"inputs": ["Hello, world"]},
        needs=Task.EMBED,
        also=("/similarity",),
        raw=True,
    ),
    TaskRoute(
        path="/embed_sparse",
        aliases=BY_MODEL,
        error_format=TEI,
        summary="Sparse vectors",
        handler=tei.embed_sparse,
        request=tei.EmbedSparseRequest,
        answer=tei.SparseVectors,
        example={"inputs": "Hello, world"},
        needs=Task.SPARSE,
    ),
    TaskRoute(
        path="/embed_all",
        aliases=BY_MODEL,
        error_format=TEI,
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
        error_format=TEI,
        summary="Cosine of one text with others",
        handler=tei.similarity,
        request=tei.SimilarityRequest,
        answer=tei.Similarities,
        example={"inputs": {"source_sentence": "a cat", "sentences": ["a kitten", "a car"]}},
        needs=Task.EMBED,
    ),
    TaskRoute(
        path="/rerank",
        aliases=BY_MODEL,
        error_format=TEI,
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
        error_format=COHERE,
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
        error_format=COHERE,
        summary="Documents by their relevance to a query, Cohere's way",
        handler=cohere.rerank,
        request=cohere.CohereRerankRequest,
        answer=cohere.CohereRanking,
        example={"query": "a cat", "documents": ["a car", "a kitten"]},
        needs=Task.CLASSIFY,
        reranks=True,
    ),
    TaskRoute(
        path="/v1/ranking",
        error_format=OPENAI,
        summary="Passages by their relevance to a query, NVIDIA's way",
        handler=nvidia.ranking,
        request=nvidia.RankingRequest,
        answer=nvidia.NvidiaRanking,
        example={"query": {"text": "a cat"}, "passages": [{"text": "a car"}, {"text": "a kitten"}]},
        needs=Task.CLASSIFY,
        reranks=True,
    ),
    TaskRoute(
        path="/score",
        aliases=("/v1/score",),
        error_format=OPENAI,
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
        aliases=BY_MODEL,
        error_format=TEI,
        summary="Labels of texts, or of pairs of texts, TEI's way",
        handler=tei_pairs.predict,
        request=tei_pairs.PredictRequest,
        answer=tei_pairs.Predictions,
        example={"inputs": [["I like it"], ["a cat", "a kitten"]]},
        needs=Task.CLASSIFY,
    ),
    TaskRoute(
        path="/classify",
        aliases=("/v1/classify",),
        error_format=OPENAI,
        summary="Labels of texts, vLLM's way",
        handler=vllm.classify,
        request=vllm.ClassifyRequest,
        answer=vllm.Classes,
        example={"input": ["I like it", "I do not"]},
        needs=Task.CLASSIFY,
    ),
    TaskRoute(
        path="/tokenize",
        error_format=TEI,
        summary="Texts to tokens, TEI's way or vLLM's",
        handler=tei_tokens.tokenize,
        request=tei_tokens.TokenizeRequest,
        answer=tei_tokens.Tokens,
        example={"inputs": "Hello, world"},
    ),
    TaskRoute(
        path="/detokenize",
        error_format=OPENAI,
        summary="Token ids to a text, vLLM's way",
        handler=tei_tokens.detokenize,
        request=tei_tokens.DetokenizeRequest,
        answer=tei_tokens.Detokenized,
        example={"tokens": [101, 7592, 102]},
    ),
    TaskRoute(
        path="/decode",
        error_format=TEI,
        summary="Token ids to texts",
        handler=tei_tokens.decode,
        request=tei_tokens.DecodeRequest,
        answer=tei_tokens.Texts,
        example={"ids": [101, 7592, 102]},
    ),
    TaskRoute(
        path="/vertex",
        error_format=TEI,
        summary="Several requests of `POST /`, Vertex AI's way",
        handler=_vertex,
        request=vertex.VertexRequest,
        answer=vertex.VertexPredictions,
        example={"instances": [{"inputs": "Hello, world"}]},
    ),
)


def tasks_by_path(model: Model) -> dict[str, TaskRoute]:
    """The route of every path of TASKS. Of a path in several routes, the first that suits the model, else the first."""
    routes: dict[str, TaskRoute] = {}
    for route in TASKS:
        for path in route.paths:
            if path not in routes or (route.suits(model) and not routes[path].suits(model)):
                routes[path] = route
    for path in BY_MODEL:
        route = routes[path]
        also = (*route.also, "/predict") if route.reranks else route.also
        routes[path] = dataclasses.replace(route, handler=_by_body(route), also=also)
    return routes


def _by_body(route: TaskRoute) -> Handler:
    """A handler of `POST /`: clients send other routes' bodies there, which `inputs` tells apart.

    An object is of `/similarity`, for any model; texts are of `/predict` to a reranker, as in TEI.
    """

    async def answer(context: RequestContext) -> tuple[bytes, bytes]:
        begin = context.begin_of("inputs")
        if begin == b"{":
            context.handle.served.check_tasks(Task.EMBED)
            return await tei.similarity(context)
        if route.reranks and begin in (b"[", b'"'):
            return await tei_pairs.predict(context)
        return await route.handler(context)

    return answer
