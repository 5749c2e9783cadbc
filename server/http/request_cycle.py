"""uvicorn's request cycle and flow control, with broken bodies and lingering connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from embert.server.http.errors import ServerError

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent

__all__ = ["BoundedCycle", "HoldableFlow"]


class HoldableFlow(FlowControl):
    """An app that waits for a body resumes reading, but not while `hold` says that too much is unparsed."""

    held = False

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

    async def receive(self) -> ASGIReceiveEvent:
        """ASGI's. Raises what is wrong with the body."""
        message: ASGIReceiveEvent = {"type": "http.disconnect"}
        if self.broken is None:
            message = await super().receive()
        if self.broken is not None and not self.disconnected and not self.response_complete:
            raise self.broken
        return message

    async def send(self, message: ASGISendEvent) -> None:
        """ASGI's."""
        begins = not self.response_started
        if begins and self.more_body:
            self.keep_alive = False  # where the rest of the body ends is not known yet
        await super().send(message)
        if begins:
            # The protocol closes, not the cycle: it may have to read on for a while.
            self.closes, self.keep_alive = not self.keep_alive, True
