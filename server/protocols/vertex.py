"""Vertex AI's protocol: several requests of `POST /` in one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from embert.engine.errors import InputError
from embert.server.http.errors import EmptyInput, PayloadTooLarge, ServerError
from embert.server.protocols.fields import FIELDS
from embert.server.protocols.request_context import JSON, Handler, RequestContext
from embert.server.registry.inputs import as_server_error
from embert.server.request.request_body import FAIL_FAST, RequestBody

__all__ = ["VertexPredictions", "VertexRequest", "answer_instances"]

Instance = dict[str, Any]
AT_ONCE = 64  # instances of a request in work


class VertexRequest(RequestBody):
    """`POST /vertex`: several requests in one."""

    known = FIELDS["vertex"]
    strings_per_text: ClassVar[int] = 2  # of pairs

    instances: Annotated[list[Instance], FAIL_FAST] = Field(
        description="Each is a body of `POST /`, and is answered as such."
    )


class VertexPredictions(BaseModel):
    """An answer for each instance."""

    predictions: list[Any]


async def answer_instances(context: RequestContext, handler: Handler) -> tuple[bytes, bytes]:
    """`POST /vertex`. `handler` answers an instance."""
    request = await context.parse(VertexRequest)
    instances = request.instances
    if not instances:
        raise EmptyInput("`instances` must not be an empty list", "instances")
    texts = sum(map(_texts, instances))
    limit = context.handle.config.max_client_batch_size
    if texts > limit:
        raise PayloadTooLarge(
            f"`instances` has {texts} texts; the limit is {limit} (--max-client-batch-size)", "instances"
        )
    answers = [b""] * len(instances)

    async def answer(index: int, instance: Instance) -> None:
        part = context.part(instance, len(instances))
        answers[index] = await _answer(part, handler, index)
        context.breakdown.add(part.breakdown)
        context.truncated += part.truncated

    await _some_at_once(answer(index, instance) for index, instance in enumerate(instances))
    return JSON, b'{"predictions":[%b]}' % b",".join(answers)


def _texts(instance: Instance) -> int:
    """The texts of an instance; of one that is no valid request, any number."""
    inputs = instance.get("inputs")
    if isinstance(inputs, dict):
        inputs = inputs.get("sentences")
    elif inputs is None:
        inputs = instance.get("texts", instance.get("documents"))
    return len(inputs) if isinstance(inputs, list) and inputs and not isinstance(inputs[0], int) else 1


async def _answer(part: RequestContext, handler: Handler, index: int) -> bytes:
    try:
        _, body = await handler(part)
    except (ServerError, InputError) as mistake:
        raise _named(mistake, part, index) from None
    return body


def _named(mistake: ServerError | InputError, part: RequestContext, index: int) -> ServerError:
    """The error of an instance. The frame that raises it must not hold it, which would be a cycle with the texts."""
    error = part.as_sent(as_server_error(mistake))
    error.message = f"instances[{index}]: {error.message}"
    return error


async def _some_at_once(answers: Iterator[Coroutine[Any, Any, None]]) -> None:
    """Run all of them, AT_ONCE at a time. Each round of the event loop starts one, because other requests need it too.

    The first failure cancels the others.
    """
    places = asyncio.Semaphore(AT_ONCE)
    tasks: list[asyncio.Task[None]] = []
    failed: list[asyncio.Task[None]] = []

    def on_end(task: asyncio.Task[None]) -> None:
        places.release()
        if task.cancelled() or task.exception() is not None:
            failed.append(task)

    try:
        for answer in answers:
            task = asyncio.ensure_future(answer)
            task.add_done_callback(on_end)
            tasks.append(task)
            await asyncio.sleep(0)
            await places.acquire()
            if failed:
                break
        await asyncio.gather(*failed, *tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
