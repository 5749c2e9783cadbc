"""Health, readiness, what is served, metrics: ordinary FastAPI endpoints."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from embert import __version__
from embert.engine import Model, Task
from embert.server.api.playground import HEADERS, PAGE
from embert.server.api.service import Service
from embert.server.http.accept import prefers, scrape_form
from embert.server.http.errors import ModelUnknown

__all__ = ["Health", "Operations", "Readiness"]


class Health(BaseModel):
    """Whether inference works."""

    status: str
    last_success_age_s: float | None = None


class Readiness(BaseModel):
    """Whether requests are taken."""

    status: str
    detail: str = ""


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


class Info(BaseModel):
    """text-embeddings-inference's fields, and what runs the model."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: dict[str, Any]
    tasks: list[str]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
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
    max_queue_tokens: int
    max_queue_seconds: float
    queue_limit_tokens: int
    payload_limit: int


class Operations:
    """The endpoints of one service. Their rows in the table of routes say the rest."""

    def __init__(self, service: Service, hint: bytes) -> None:
        """`hint` is the text of `GET /` for clients that are no browsers."""
        self._service, self._hint = service, hint
        self._created = int(time.time())

    async def front(self, request: Request) -> Response:
        """A page for browsers; a few lines of text for others."""
        asked = [value for name, value in request.scope["headers"] if name == b"accept"]
        if prefers(b"text/html", b"text/plain", asked):
            return Response(PAGE, headers=HEADERS, media_type="text/html")
        return Response(self._hint, headers={"vary": "accept"}, media_type="text/plain")

    async def health(self) -> Response:
        """Whether the last forward worked, and was not long ago."""
        healthy, age = self._service.router.health()
        reason = self._service.admission.unready_reason() if age is None else "no forward worked lately"
        body = Health(status="ok" if healthy else reason, last_success_age_s=None if age is None else round(age, 3))
        return JSONResponse(body.model_dump(), 200 if healthy else 503)

    async def livez(self) -> Readiness:
        """The process answers."""
        return Readiness(status="ok")

    async def readyz(self) -> Response:
        """503 while loading and, first thing, while draining."""
        admission = self._service.admission
        if admission.draining or not self._service.router.connected:
            status = "draining" if admission.draining else "loading"
            return JSONResponse(Readiness(status=status, detail=admission.unready_reason()).model_dump(), 503)
        return JSONResponse(Readiness(status="ready").model_dump())

    async def info(self) -> Info:
        """What is served, and its limits."""
        service = self._service
        config, model, engine = service.config, service.model, service.engine
        return Info(
            model_id=model.model_id,
            model_sha=model.revision,
            model_dtype=engine.dtype if engine else config.dtype,
            served_model_name=service.served.name,
            model_type=_model_type(model),
            tasks=service.served.task_names,
            max_concurrent_requests=service.max_queue_tokens,  # each has at least one token
            max_input_length=model.max_input_length,
            max_batch_tokens=engine.max_batch_tokens if engine else config.max_batch_tokens or 0,
            max_batch_requests=config.max_batch_requests,
            max_client_batch_size=config.max_client_batch_size,
            auto_truncate=config.auto_truncate,
            tokenization_workers=config.http_processes * config.tokenization_threads,
            version=__version__,
            backend=engine.encoder if engine else config.encoder,
            backend_choice=engine.choice if engine else "",
            device=engine.device if engine else config.device,
            device_name=engine.device_name if engine else "",
            architecture=model.architecture.family,
            dimensions=model.width,
            prompts=sorted(model.prompts),
            adapters=list(model.architecture.adapters.names) if model.architecture.adapters else [],
            max_queue_tokens=service.max_queue_tokens,
            max_queue_seconds=config.max_queue_seconds,
            queue_limit_tokens=service.queue_limit,
            payload_limit=config.payload_limit,
        )

    async def models(self) -> ModelList:
        """The one model served here."""
        return ModelList(data=[ModelCard(id=self._service.served.name, created=self._created)])

    async def model_card(self, id: str) -> ModelCard:  # noqa: A002 - the path's name in OpenAI's API
        """The model, by its served name or its model id."""
        try:
            self._service.served.check_name(id)
        except ModelUnknown as error:
            error.param = "id"
            raise
        return ModelCard(id=self._service.served.name, created=self._created)

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format, or OpenMetrics."""
        answer = await self._service.scrapes.answer(scrape_form(request.scope["headers"]))
        return Response(answer.body, headers={name.decode(): value.decode() for name, value in answer.headers})


def _model_type(model: Model) -> dict[str, Any]:
    """TEI's description of the model: an embedding, a classifier, or a reranker, which has one label."""
    classifier = model.heads.classifier
    if classifier is None:
        return {"embedding": {"pooling": "splade" if model.tasks == Task.SPARSE else model.pooling}}
    labels = {str(index): label for index, label in enumerate(classifier.labels)}
    kind = "reranker" if len(labels) == 1 else "classifier"
    return {kind: {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}}
