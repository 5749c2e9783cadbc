"""Health, readiness, what is served, metrics: ordinary FastAPI routes."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from embert import __version__
from embert.server.api.openapi import OpenAIError, TeiError
from embert.server.api.playground import HEADERS, HINT, PAGE
from embert.server.api.service import Service
from embert.server.http.errors import ModelUnknown

__all__ = ["operations"]

_Responses = dict[int | str, dict[str, Any]]


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
    max_queue_tokens: int
    max_queue_seconds: float
    queue_limit_tokens: int
    payload_limit: int


def operations(service: Service) -> APIRouter:
    """The routes, bound to one service."""
    router = APIRouter(tags=["operations"])
    engines, admission = service.router, service.admission
    config, model = service.config, service.model
    created = int(time.time())
    no_key: _Responses = {401: {"model": TeiError, "description": "No key or a wrong one"}}
    openai_no_key: _Responses = {401: {"model": OpenAIError, "description": "No key or a wrong one"}}
    kinds = {kind: {"schema": {"type": "string"}} for kind in ("text/html", "text/plain")}
    page: _Responses = {200: {"content": kinds}}
    readiness: _Responses = {200: {"model": Readiness}, 503: {"model": Readiness}}

    @router.get("/", summary="A page for browsers; a few lines of text for others", responses=page)
    async def front(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return Response(PAGE, headers=HEADERS, media_type="text/html")
        return Response(HINT, headers={"vary": "accept"}, media_type="text/plain")

    @router.get("/health", summary="Does inference work?", responses={200: {"model": Health}, 503: {"model": Health}})
    @router.get("/ping", include_in_schema=False)
    async def health() -> Response:
        healthy, age = engines.health()
        body = Health(
            status="ok" if healthy else admission.unready_reason() if age is None else "no forward worked lately"
        )
        body.last_success_age_s = None if age is None else round(age, 3)
        return JSONResponse(body.model_dump(), 200 if healthy else 503)

    @router.get("/livez", summary="Does this process answer?")
    async def livez() -> Readiness:
        return Readiness(status="ok")

    @router.get("/readyz", summary="Are requests taken?", responses=readiness)
    async def readyz() -> Response:
        if admission.draining:
            return JSONResponse(Readiness(status="draining", detail=admission.unready_reason()).model_dump(), 503)
        if not engines.connected:
            return JSONResponse(Readiness(status="loading", detail=admission.unready_reason()).model_dump(), 503)
        return JSONResponse(Readiness(status="ready").model_dump())

    @router.get("/info", summary="What is served, and its limits", responses=no_key)
    async def info() -> Info:
        engine = service.engine
        batch_tokens = engine.max_batch_tokens if engine else config.max_batch_tokens or 0
        return Info(
            model_id=model.model_id,
            model_sha=model.revision,
            model_dtype=engine.dtype if engine else config.dtype,
            served_model_name=service.served_name,
            model_type={"embedding": {"pooling": model.pooling}},
            max_concurrent_requests=service.max_queue_tokens,  # each has at least one token
            max_input_length=model.max_input_length,
            max_batch_tokens=batch_tokens,
            max_batch_requests=config.max_batch_requests,
            max_client_batch_size=config.max_client_batch_size,
            auto_truncate=config.auto_truncate,
            tokenization_workers=config.http_processes * config.tokenization_threads,
            version=__version__,
            backend=engine.encoder if engine else config.encoder,
            backend_choice=engine.choice if engine else "",
            device=engine.device if engine else config.device,
            device_name=engine.device_name if engine else "",
            architecture=model.config.architecture,
            dimensions=model.width,
            prompts=sorted(model.prompts),
            max_queue_tokens=service.max_queue_tokens,
            max_queue_seconds=config.max_queue_seconds,
            queue_limit_tokens=service.queue_limit,
            payload_limit=config.payload_limit,
        )

    @router.get("/v1/models", summary="The one model served here", responses=openai_no_key)
    async def models() -> ModelList:
        return ModelList(data=[ModelCard(id=service.served_name, created=created)])

    @router.get(
        "/v1/models/{id:path}",
        summary="The model, by name or id",
        responses={404: {"model": OpenAIError, "description": "Another model"}, **openai_no_key},
    )
    async def model_card(id: str) -> ModelCard:  # noqa: A002 - the path's name in OpenAI's API
        try:
            service.check_model(id)
        except ModelUnknown as error:
            error.param = "id"
            raise
        return ModelCard(id=service.served_name, created=created)

    text: _Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **no_key}

    @router.get("/metrics", summary="Prometheus metrics", response_class=Response, responses=text)
    async def metrics() -> Response:
        text, content_type = await service.scrapes.answer()
        return Response(text, headers={"content-type": content_type})

    return router
