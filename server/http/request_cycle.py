"""uvicorn's request cycle and flow control, with broken bodies and lingering connections."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from embert.server.http.errors import Reply, ServerError

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent

__all__ = ["BoundedCycle", "HoldableFlow"]

_JOINED_BYTES = 1 << 18  # a longer body is written beside its head, which saves a copy


class HoldableFlow(FlowControl):
    """An app that waits for a body resumes reading, but not while `hold` says that too much is unparsed."""

    held = False
    answer_bytes = 0  # of the newest answer's body

    def hold(self) -> None:
        """Read nothing more until `release`."""
        self.held = True
        self.pause_reading()

    def release(self) -> None:
        """Read again, where `hold` stopped it."""
        if self.held:
            self.held = False
            self.resume_reading()

    def resume_reading(self) -> None:
        """Resume, unless held."""
        if not self.held:
            super().resume_reading()


class BoundedCycle(RequestResponseCycle):
    """A request and its answer."""

    broken: ServerError | None = None  # what is wrong with the body, from here on
    closes = False  # the connection ends with this answer
    flow: HoldableFlow
    direct: asyncio.Task[None] | None = None  # what answers it without the app
    _tasks: set[asyncio.Task[None]]  # of the server, with `direct` while that runs

    async def receive(self) -> ASGIReceiveEvent:
        """ASGI's. Raises what is wrong with the body."""
        message: ASGIReceiveEvent = {"type": "http.disconnect"}
        if self.broken is None:
            message = await super().receive()
        if self.broken is not None and not self.disconnected and not self.response_complete:
            raise self.broken
        return message

    def begin_direct(self, task: asyncio.Task[None], tasks: set[asyncio.Task[None]]) -> None:
        """Note the task that answers, among the server's `tasks`."""
        self.direct, self._tasks = task, tasks
        tasks.add(task)

    def end_direct(self) -> None:
        """The task ends; called by itself, because a callback of a task costs a step of the event loop."""
        if self.direct is not None:
            self._tasks.discard(self.direct)
            self.direct = None

    def take_body(self) -> bytes:
        """The whole body, of a request that is complete."""
        body, self.body = bytes(self.body), bytearray()
        return body

    def reply(self, reply: Reply, request_id: bytes) -> None:
        """Answer in one write, without ASGI. Does nothing where the client has left."""
        if self.disconnected:
            return
        close = b"" if self.keep_alive else b"connection: close\r\n"
        head = b"%b%bx-request-id: %b\r\n%b\r\n" % (STATUS_LINE[reply.status], reply.head, request_id, close)
        self.response_started = self.response_complete = True
        self.flow.answer_bytes = len(reply.body)
        self.closes, self.keep_alive = not self.keep_alive, True
        if len(reply.body) < _JOINED_BYTES:
            self.transport.write(head + reply.body)
        else:
            self.transport.write(head)
            self.transport.write(reply.body)
        self.message_event.set()
        self.on_response()

    async def send(self, message: ASGISendEvent) -> None:
        """ASGI's."""
        begins = not self.response_started
        if message["type"] == "http.response.body":
            self.flow.answer_bytes = len(message.get("body", b""))
        if begins and self.more_body:
            self.keep_alive = False  # where the rest of the body ends is not known yet
        await super().send(message)
        if begins:
            # The protocol closes, not the cycle: it may have to read on for a while.
            self.closes, self.keep_alive = not self.keep_alive, True
