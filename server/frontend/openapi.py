"""The OpenAPI document: the tasks' routes, which FastAPI does not serve, and the bounds of the served models."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from embert.engine import Model
from embert.server.config import ServeConfig
from embert.server.frontend.routes import TASKS, TaskRoute, tasks_by_path
from embert.server.http.errors import ErrorFormat
from embert.server.protocols.cohere import CohereError
from embert.server.protocols.decisions import TypeSafeError
from embert.server.protocols.ollama import OllamaError
from embert.server.protocols.openai import OpenAIError
from embert.server.protocols.tei import TeiError
from embert.server.registry.model_registry import ModelRegistry
from embert.server.request.request_body import InputForm, RequestBody

Served = Sequence[tuple[Model, ServeConfig]]  # the models of a server, each with its options

ERROR_MODELS: dict[ErrorFormat, type[BaseModel]] = {
    ErrorFormat.COHERE: CohereError,
    ErrorFormat.OLLAMA: OllamaError,
    ErrorFormat.OPENAI: OpenAIError,
    ErrorFormat.TEI: TeiError,
    ErrorFormat.TYPESAFE: TypeSafeError,
}

_ERRORS = {
    400: "The body is not JSON, or there is nothing to encode",
    401: "No key or a wrong one",
    404: "Another model",
    408: "The body did not arrive in time",
    413: "Too many bytes or texts",
    422: "A field's type or value",
    424: "The encoder failed on this request",
    429: "Over the queue's token budget; see Retry-After",
    503: "Loading, draining, the engine restarting, or out of time",
}
_MISSING = ", or the model does not have the task"

_HEADERS = (
    "The header `X-Request-Timeout` limits the seconds until the response. `X-Priority: bulk` lets other requests go "
    "first."
)

_RAW = {
    "application/octet-stream": {
        "schema": {
            "type": "string",
            "format": "binary",
            "description": "little-endian float32 rows; see X-Embedding-Shape",
        }
    }
}


def description(registry: ModelRegistry) -> str:
    """The description of the API: the served models, and how a request chooses one."""
    models = [f"* `{handle.name}`: {', '.join(handle.task_names)}" for handle in registry.all]
    return "\n".join(
        (
            "Embeddings, scores, labels, entities and decisions from encoders and decoders, in the protocols of "
            "OpenAI, text-embeddings-inference, Cohere, Ollama, vLLM, NVIDIA, TypeSafe and Hugging Face's pipelines.",
            "",
            f"The model{'s' * registry.several} of this server:",
            "",
            *models,
            "",
            "Every `POST` route is also below `/models/NAME`, as `/models/NAME/embed`, for the model of that name. "
            "Otherwise `model` in the body chooses, if the route has this field; else the first model that has the "
            "task.",
        )
    )


def complete_document(document: dict[str, Any], served: Served) -> None:
    """Adds the tasks to FastAPI's document, with the bounds of the models served.

    Of several models a bound is the largest, and a choice has those of all. `x-task-missing` marks the routes that no
    model can serve.
    """
    models = {model for task in TASKS for model in (task.request, task.response)} | set(ERROR_MODELS.values())
    inputs: list[tuple[Any, Literal["validation"]]] = [
        (model, "validation") for model in sorted(models, key=lambda model: model.__name__)
    ]
    names, schemas = models_json_schema(inputs, ref_template="#/components/schemas/{model}")
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    operations: dict[str, Any] = document["paths"]
    for item in operations.values():
        item["get"]["responses"].pop("422", None)  # FastAPI's own, which our routes do not have
    work: dict[str, Any] = {
        path: {"post": _operation(task, path, names, served)} for path, task in tasks_by_path(served[0][0]).items()
    }
    for path in work.keys() & operations.keys():
        work[path] |= operations.pop(path)
    document["paths"] = work | operations
    _state_bounds(document["components"]["schemas"], served)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)


def _operation(task: TaskRoute, path: str, names: dict[Any, Any], served: Served) -> dict[str, Any]:
    able = next((model for model, _ in served if task.suits(model)), None)
    error = {"application/json": {"schema": names[ERROR_MODELS[task.error_format], "validation"]}}
    content: dict[str, Any] = {"application/json": {"schema": names[task.response, "validation"]}}
    body = {"schema": names[task.request, "validation"], "example": task.example_for(able or served[0][0])}
    if others := [other for other in TASKS if other.path in task.also]:
        requests = dict.fromkeys(route.request for route in (task, *others))
        body["schema"] = {"anyOf": [names[request, "validation"] for request in requests]}
        responses = dict.fromkeys(route.response for route in (task, *others))
        content["application/json"]["schema"] = {"anyOf": [names[response, "validation"] for response in responses]}
    name_parameter = re.search(r"\{(\w+)\}", path)
    parameter = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    lacking = 424 if task.error_format is ErrorFormat.TEI or task.decides else 400
    can_lack = task.needs | task.needs_one or task.decides
    errors = {**_ERRORS, lacking: _ERRORS[lacking] + _MISSING} if can_lack else _ERRORS
    operation = {
        "tags": [task.error_format.value],
        "summary": task.summary if path == task.path else f"Alias of {task.path}",
        "description": _HEADERS,
        "operationId": "post_" + (re.sub(r"\W+", "_", path).strip("_") or "root"),
        **({"parameters": [{"name": name_parameter[1], **parameter}]} if name_parameter else {}),
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {"200": {"description": "Response", "content": content | _RAW if task.raw else content}}
        | {str(status): {"description": text, "content": error} for status, text in errors.items()},
    }
    return operation if able is not None else operation | {"x-task-missing": True}


def _state_bounds(schemas: dict[str, Any], served: Served) -> None:
    """Add what pydantic's models leave to the handlers, because it depends on the model or is 400 there."""
    models = [model for model, _ in served]
    vocabulary = max(model.config.vocab_size for model in models)

    def bound(schema: dict[str, Any], form: InputForm, most: int) -> None:
        for option in schema.get("anyOf", [schema]):
            kind = option.get("type")
            if kind == "string":
                option["minLength"] = form.shortest
            elif kind == "integer":
                option.update(minimum=0, maximum=vocabulary - 1)
            elif kind == "array":
                item = option["items"].get("type")
                option["minItems"] = form.fewest
                if item != "integer":
                    option["maxItems"] = form.together if form.together and item == "string" else most
                # Texts of a pair may be empty.
                bound(option["items"], dataclasses.replace(form, shortest=0) if form.together else form, most)

    for body in _bodies(RequestBody):
        for field in body.model_fields:
            if body.__name__ in schemas and not body.model_fields[field].is_required():
                _take_null(schemas[body.__name__]["properties"][field])
        for field, form in body.input_forms.items():
            most = max(getattr(config, body.text_limit) for _, config in served)
            bound(schemas[body.__name__]["properties"][field], form, form.most or most)
    adapters = [model.config.adapters for model in models]
    tasks = [name for adapter in adapters if adapter is not None for name in adapter.names]
    choices = {
        "prompt_name": sorted({name for model in models for name in model.prompts}),
        "task": list(dict.fromkeys(tasks)),
    }
    for schema in schemas.values():
        for field, property_ in schema.get("properties", {}).items():
            if field == "dimensions" and "anyOf" in property_:
                least = property_.pop("minimum", 1)
                property_["anyOf"][0].update(minimum=least, maximum=max(model.width for model in models))
            elif field in choices and "enum" not in property_["anyOf"][0]:  # vLLM's `task` is of another kind
                property_["anyOf"][0]["enum"] = choices[field]
                if not choices[field]:
                    property_["anyOf"].pop(0)


def _take_null(schema: dict[str, Any]) -> None:
    """State that null means that the field is absent."""
    if "anyOf" not in schema:
        about = ("title", "description", "default", "examples")
        schema["anyOf"] = [{key: schema.pop(key) for key in [*schema] if key not in about}]
    if {"type": "null"} not in schema["anyOf"]:
        schema["anyOf"].append({"type": "null"})


def _bodies(base: type[RequestBody]) -> Iterator[type[RequestBody]]:
    """All request bodies, and the objects in them."""
    for kind in base.__subclasses__():
        yield kind
        yield from _bodies(kind)
