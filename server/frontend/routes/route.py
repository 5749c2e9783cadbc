"""What a row of the tables says of its route."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import BaseModel

from embert.engine import Model
from embert.engine.tasks import ALL_TASKS, NO_TASK, Task
from embert.server.frontend.input.request_body import RequestBody
from embert.server.frontend.models.served_model import Capability
from embert.server.frontend.request_context import Handler
from embert.server.http.errors import Dialect

__all__ = ["Operation", "Route", "TaskRoute"]


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
    example_of: Mapping[Task, Mapping[str, Any]] = field(default_factory=dict)  # more of it, by the model's first
    needs: Task = NO_TASK  # tasks that the model must have, whatever the request says
    needs_one: Task = NO_TASK  # and at least one of these; the request says which
    reranks: bool = False  # the model must be a classifier of one label
    also: tuple[str, ...] = ()  # the paths of other rows whose requests it takes too
    raw: bool = False  # `Accept: application/octet-stream` gets raw float32 rows

    def example_for(self, model: Model) -> dict[str, Any]:
        """A request that the model can answer, if it suits the row."""
        main = next((task for task in ALL_TASKS if task in model.tasks & self.needs_one), NO_TASK)
        return {**self.example, **self.example_of.get(main, {})}

    @property
    def wanted(self) -> Capability:
        """What a model must be able to do."""
        return Capability(self.needs, self.needs_one, self.reranks)

    def suits(self, model: Model) -> bool:
        """Whether the model has the tasks."""
        return self.wanted.suits(model)


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
