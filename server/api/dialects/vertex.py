"""Vertex AI's dialect: several requests of `POST /` in one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from embert.server.api.input.request_body import FAIL_FAST, RequestBody
from embert.server.api.request_context import JSON, Handler, RequestContext
from embert.server.http.errors import EmptyInput, PayloadTooLarge, ServerError

__all__ = ["VertexPredictions", "VertexRequest", "answer_instances"]

Instance = dict[str, Any]


class VertexRequest(RequestBody):
    """`POST /vertex`: several requests in one."""

    strings_per_text: ClassVar[int] = 2  # of pairs

    instances: Annotated[list[Instance], FAIL_FAST] = Field(
        description="Each is a body of `POST /`, and is answered as such."
    )


class VertexPredictions(BaseModel):
    """An answer for each instance."""

    predictions: list[Any]


async def answer_instances(context: RequestContext, handler_of: Callable[[Instance], Handler]) -> tuple[bytes, bytes]:
    """`POST /vertex`. `handler_of` gives the handler of an instance, or raises TaskMissing."""
    request = await context.parse(VertexRequest)
    instances = request.instances
    if not instances:
        raise EmptyInput("`instances` must not be an empty list", "instances")
    texts = sum(map(_texts, instances))
    limit = context.service.config.max_client_batch_size
    if texts > limit:
        raise PayloadTooLarge(
            f"`instances` has {texts} texts; the limit is {limit} (--max-client-batch-size)", "instances"
        )
    parts = [context.part(instance, len(instances)) for instance in instances]
    answers = await _together(
        _answer(part, handler_of, instance, index)
        for index, (part, instance) in enumerate(zip(parts, instances, strict=True))
    )
    for part in parts:
        context.breakdown.add(part.breakdown)
        context.truncated += part.truncated
    return JSON, b'{"predictions":[%b]}' % b",".join(answers)


def _texts(instance: Instance) -> int:
    """The texts of an instance; of one that is no valid request, any number."""
    given = instance.get("inputs")
    if isinstance(given, dict):
        given = given.get("sentences")
    elif given is None:
        given = instance.get("texts", instance.get("documents"))
    return len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 1


async def _answer(
    part: RequestContext, handler_of: Callable[[Instance], Handler], instance: Instance, index: int
) -> bytes:
    try:
        _, body = await handler_of(instance)(part)
    except ServerError as error:
        error.message = f"instances[{index}]: {error.message}"
        raise
    return body


async def _together(answers: Iterable[Awaitable[bytes]]) -> list[bytes]:
    """All of them. Once one fails, the others are of no use."""
    tasks = [asyncio.ensure_future(each) for each in answers]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
