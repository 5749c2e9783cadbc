"""A task's handler as an endpoint: options and body in, answer or error out. Half the cost of FastAPI's."""

from __future__ import annotations

import time

from starlette.types import Receive, Scope, Send

from embert.server.http.errors import ErrorFormat, Reply, ServerError, error_reply, send_reply
from embert.server.observability.request_record import SCOPE_KEY, RequestRecord
from embert.server.request.model_registry import ModelSelector
from embert.server.request.request_context import Handler, RequestContext

__all__ = ["TaskEndpoint"]


class TaskEndpoint:
    """Of one task's route; also its ASGI app."""

    def __init__(self, selector: ModelSelector, handler: Handler, error_format: ErrorFormat) -> None:
        """`selector` chooses the model; the handler may need more capabilities than the route."""
        self._selector, self._handler, self._error_format = selector, handler, error_format
        self._can = selector.can
        self._model = "" if selector.by_body else selector.default.served.name  # for metrics, until the body is read
        self._metrics = selector.registry.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await send_reply(send, await self.reply(scope, receive))

    async def reply(self, scope: Scope, receive: Receive | None, body: bytes = b"") -> Reply:
        """The answer to a request, whose body is still to be read by `receive`, or is `body`."""
        record: RequestRecord = scope[SCOPE_KEY]
        record.model = self._model
        context: RequestContext | None = None
        try:
            if not self._can:  # and neither can another model
                self._selector.check(self._selector.default)
            context = RequestContext(self._selector, scope, receive)
            record.parts = context.breakdown
            record.priority = context.options.priority
            if receive is not None:
                await context.read_body()
            else:
                context.take_body(body)
            content_type, answer = await self._handler(context)
        except ServerError as error:
            if error.reject_reason is not None:
                self._metrics.rejected[error.reject_reason].inc()
            if context is not None:
                context.as_sent(error)
            return error_reply(error, self._error_format)
        context.breakdown.encoded()
        if context.trace is not None and context.breakdown.answered is not None:
            context.trace.stage("encode", context.breakdown.answered, time.perf_counter())
        return Reply(200, context.head(content_type, len(answer)), answer)
