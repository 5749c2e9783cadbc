"""Vertex AI's protocol: several requests of `POST /` in one."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from embert.engine.errors import InputError
from embert.server.http.errors import EmptyInput, ServerError
from embert.server.protocols.fields import FIELDS
from embert.server.protocols.request_context import JSON, Handler, RequestContext
from embert.server.protocols.serialization import join
from embert.server.registry.tokenizing import as_server_error
from embert.server.request.request_body import FAIL_FAST, RequestBody

AT_ONCE = 64  # instances of one request in progress


class VertexRequest(RequestBody):
    """`POST /vertex`: several requests in one."""

    known = FIELDS["vertex"]
    strings_per_text: ClassVar[int] = 2  # of pairs

    instances: Annotated[list[dict[str, Any]], FAIL_FAST] = Field(description="Each is a body of `POST /`.")


class VertexPredictions(BaseModel):
    """A response for each instance."""

    predictions: list[Any]


async def predict(context: RequestContext, handler: Handler) -> tuple[bytes, bytes]:
    """`POST /vertex`. `handler` serves one instance. The first error cancels the other instances."""
    instances = (await context.parse(VertexRequest)).instances
    if not instances:
        raise EmptyInput("must not be an empty list", "instances")
    context.handle.limits.check_count(sum(map(_texts, instances)), "instances")
    bodies = [b""] * len(instances)
    waiting, turn = iter(enumerate(instances)), asyncio.Lock()

    async def serve_instances() -> None:
        for index, instance in waiting:
            async with turn:
                await asyncio.sleep(0)  # each round of the event loop starts one: other requests need it too
            part = context.part(instance, len(instances))
            try:
                bodies[index] = bytes((await handler(part))[1])
            except (ServerError, InputError) as mistake:
                raise _instance_error(part, mistake, index) from None
            context.breakdown.add(part.breakdown)
            context.truncated += part.truncated

    workers = [asyncio.ensure_future(serve_instances()) for _ in range(min(AT_ONCE, len(instances)))]
    try:
        await asyncio.gather(*workers)
    finally:  # the first error ends the others
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    bodies[0] = b'{"predictions":[' + bodies[0]
    bodies[-1] += b"]}"
    return JSON, await join(bodies, b",")


def _instance_error(part: RequestContext, mistake: ServerError | InputError, index: int) -> ServerError:
    """Names the instance in an error. Not inline: a frame with the error and the texts would be a cycle."""
    error = as_server_error(mistake)
    error.rename(part.names)
    error.instance = index
    return error


def _texts(instance: dict[str, Any]) -> int:
    """Counts the texts of an instance. For an invalid one, returns any number."""
    inputs = instance.get("inputs")
    if isinstance(inputs, dict):
        inputs = inputs.get("sentences")
    elif inputs is None:
        inputs = instance.get("texts", instance.get("documents"))
    return len(inputs) if isinstance(inputs, list) and inputs and not isinstance(inputs[0], int) else 1
