"""Health, readiness, models, metrics: ordinary FastAPI endpoints. Their routes are in routes.py."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from embert import __version__
from embert.engine import Model, Task
from embert.server.frontend.playground import HEADERS, page
from embert.server.http.request_head import prefers, scrape_form
from embert.server.protocols.ollama import OllamaModels, OllamaVersion, describe
from embert.server.registry.model_handle import ModelHandle
from embert.server.registry.model_registry import ModelRegistry


class Health(BaseModel):
    """State of inference."""

    status: str
    last_success_age_s: float | None = None


class Liveness(BaseModel):
    """State of the process."""

    status: str
    detail: str = ""


class Readiness(Liveness):
    """State of the server and of each model: `ready`, `loading` or `failed`."""

    models: dict[str, str]


class ModelCard(BaseModel):
    """OpenAI's model object."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "embert"


class ModelList(BaseModel):
    """OpenAI's list of models."""

    object: str = "list"
    data: list[ModelCard]


class ModelMetadata(BaseModel):
    """text-embeddings-inference's fields, and what runs the model."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, Any]
    tasks: list[str]
    max_concurrent_requests: int | None  # this and other limits: null until an engine has the model
    max_input_length: int
    max_batch_tokens: int | None
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    backend: str
    backend_choice: str
    device: str
    device_name: str
    architecture: str
    dimensions: int
    prompts: list[str]
    adapters: list[str]
    max_queue_tokens: int | None
    max_queue_seconds: float
    queue_limit_tokens: int | None
    payload_limit: int


class Info(ModelMetadata):
    """The first model, and all of them."""

    models: list[ModelMetadata]


class Operations:
    """The endpoints. The rest is in their rows of the table of routes."""

    def __init__(self, registry: ModelRegistry, hint: bytes) -> None:
        """`hint` is the text of `GET /` for clients other than browsers."""
        self._registry, self._hint = registry, hint
        self._created = int(time.time())

    async def front(self, request: Request) -> Response:
        """A page for browsers; a few lines of text for others."""
        accept = [value for name, value in request.scope["headers"] if name == b"accept"]
        if prefers(b"text/html", b"text/plain", accept):
            prefix = request.headers.get("x-forwarded-prefix", "")
            return Response(page(prefix), headers=HEADERS, media_type="text/html")
        return Response(self._hint, headers={"vary": "accept"}, media_type="text/plain")

    async def health(self) -> Response:
        """503 if the last forward failed or was long ago."""
        healthy, age = self._registry.router.health()
        reason = _unready(self._registry.all) if age is None else "no forward worked lately"
        body = Health(status="ok" if healthy else reason, last_success_age_s=None if age is None else round(age, 3))
        return JSONResponse(body.model_dump(), 200 if healthy else 503)

    async def livez(self) -> Liveness:
        return Liveness(status="ok")

    async def readyz(self) -> Response:
        """503 while a model loads for the first time, while none can work and, first thing, while draining.

        Also until every HTTP process has started: those that start later would get none of the connections that clients
        keep open. A model that has failed must not keep the others from their requests.
        """
        registry = self._registry
        states = {handle.name: handle.state for handle in registry.all}
        states |= dict.fromkeys(registry.broken, "failed")
        waited_for = [handle for handle in registry.all if handle.state == "loading" and not handle.admission.was_ready]
        if registry.router.draining:
            return _readiness("draining", _unready(registry.all), states)
        if waited_for or "ready" not in states.values():
            status = "failed" if set(states.values()) == {"failed"} else "loading"
            unready = [handle for handle in registry.all if states[handle.name] != "ready"]
            return _readiness(status, _unready(unready, registry.broken), states)
        if not registry.router.counters.all_http_started():
            return _readiness("loading", "not all HTTP processes have started", states)
        failed = [handle for handle in registry.all if handle.state == "failed"]
        return _readiness("ready", _unready(failed, registry.broken), states)

    async def readyz_of(self, name: str) -> Response:
        """Returns the readiness of one model, whatever the state of the others."""
        if (reason := self._registry.broken.get(name)) is not None:
            return _readiness("failed", f"{name} has failed ({reason})", {name: "failed"})
        handle = self._registry.in_path(name)
        states = {handle.name: handle.state}
        if handle.admission.draining:
            return _readiness("draining", _unready([handle]), states)
        return _readiness(handle.state, "" if handle.state == "ready" else _unready([handle]), states)

    async def info(self) -> Info:
        models = [_metadata(handle) for handle in self._registry.all]
        return Info(**models[0].model_dump(), models=models)

    async def info_of(self, name: str) -> ModelMetadata:
        return _metadata(self._registry.in_path(name))

    async def models(self) -> ModelList:
        registry = self._registry
        names = (*registry.names, *registry.broken)
        return ModelList(data=[ModelCard(id=name, created=self._created) for name in names])

    async def model_card(self, id: str) -> ModelCard:  # noqa: A002 - the path's name in OpenAI's API
        """A model, by its served name or its model id; the first where any name will do."""
        registry = self._registry
        handle = registry.by_name.get(id)
        if handle is None and id not in registry.broken and not registry.is_any(id):
            raise registry.unknown(id, "id")
        name = id if id in registry.broken else (handle or registry.first).name
        return ModelCard(id=name, created=self._created)

    async def ollama_models(self) -> OllamaModels:
        return OllamaModels(models=[describe(handle) for handle in self._registry.all])

    async def ollama_version(self) -> OllamaVersion:
        return OllamaVersion(version=__version__)

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format, or OpenMetrics."""
        exposition = await self._registry.scrapes.render(scrape_form(request.scope["headers"]))
        return Response(exposition.body, headers={name.decode(): value.decode() for name, value in exposition.headers})


def _readiness(status: str, detail: str, models: dict[str, str]) -> Response:
    body = Readiness(status=status, detail=detail, models=models)
    return JSONResponse(body.model_dump(), 200 if status == "ready" else 503)


def _unready(registry: Iterable[ModelHandle], broken: Mapping[str, str] | None = None) -> str:
    reasons = [handle.admission.unready_reason() for handle in registry]
    reasons += [f"{name} has failed ({reason})" for name, reason in (broken or {}).items()]
    return "; ".join(dict.fromkeys(reasons))


def _metadata(handle: ModelHandle) -> ModelMetadata:
    config, model, engine = handle.config, handle.model, handle.engine
    return ModelMetadata(
        model_id=model.model_id,
        model_sha=model.revision,
        model_dtype=engine.dtype if engine else config.dtype,
        served_model_name=handle.name,
        model_type=_model_type(model),
        tasks=handle.task_names,
        max_concurrent_requests=handle.admission.max_queue_tokens or None,  # each has at least one token
        max_input_length=model.max_input_length,
        max_batch_tokens=engine.max_batch_tokens if engine else config.max_batch_tokens,
        max_batch_requests=None,
        max_client_batch_size=config.max_client_batch_size,
        auto_truncate=config.auto_truncate,
        tokenization_workers=config.http_processes * config.tokenization_threads,
        version=__version__,
        backend=engine.encoder if engine else config.encoder,
        backend_choice=engine.choice if engine else "",
        device=engine.device if engine else config.device,
        device_name=engine.device_name if engine else "",
        architecture=model.config.model_type,
        dimensions=model.width,
        prompts=sorted(model.prompts),
        adapters=list(model.config.adapters.names) if model.config.adapters else [],
        max_queue_tokens=handle.admission.max_queue_tokens or None,
        max_queue_seconds=config.max_queue_seconds,
        queue_limit_tokens=handle.admission.queue_limit or None,
        payload_limit=config.payload_limit,
    )


def _model_type(model: Model) -> dict[str, Any]:
    """TEI's description of the model: an embedding, a classifier, or a reranker, which has one label.

    Of a model that classifies tokens, or decides only, TEI has none.
    """
    classifier = model.heads.classifier or model.heads.token_classifier
    if model.heads.decider is not None:
        return {"decider": {}}
    if classifier is None:
        return {"embedding": {"pooling": "splade" if model.tasks == Task.SPARSE else model.pooling}}
    labels = {str(index): label for index, label in enumerate(classifier.labels)}
    kind = "reranker" if len(labels) == 1 else "classifier"
    if model.heads.classifier is None:
        kind = "token_classifier"
    return {kind: {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}}
