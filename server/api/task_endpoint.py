"""Plain ASGI around a task's handler: options and body in, answer or error out. Half the cost of a FastAPI endpoint."""

from __future__ import annotations

import time

from starlette.types import Receive, Scope, Send

from embert.engine import Task
from embert.server.api.request_context import Handler, RequestContext
from embert.server.api.service import Service
from embert.server.http.errors import Dialect, ServerError, send_error

__all__ = ["TaskEndpoint"]


class TaskEndpoint:
    """The ASGI app of one task's route."""

    def __init__(self, service: Service, handler: Handler, dialect: Dialect, needs: Task, *, reranks: bool) -> None:
        """`needs` are the tasks without which the model cannot answer; the handler may need more.

        With `reranks` it must have one label, too.
        """
        self._service, self._handler, self._dialect, self._needs = service, handler, dialect, needs
        self._reranks = reranks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        service = self._service
        try:
            service.served.check_tasks(self._needs, reranks=self._reranks)
            context = RequestContext(service, scope, receive)
            if context.trace is not None:
                context.trace.model, context.trace.bulk = service.served.name, context.options.bulk
            await context.read_body()
            content_type, body = await self._handler(context)
        except ServerError as error:
            if error.reject_reason is not None:
                service.metrics.rejected[error.reject_reason].inc()
            await send_error(send, error, self._dialect)
            return
        breakdown = context.breakdown
        if breakdown.answered is not None:
            now = time.perf_counter()
            service.metrics.response_encode_duration.observe(now - breakdown.answered)
            if context.trace is not None:
                context.trace.stage("encode", breakdown.answered, now)
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *context.answer_headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
