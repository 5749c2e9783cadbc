"""One engine in an HTTP process: its state, and the socket to its present start.

All requests of one tick of the event loop leave in one message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from embert.server.engine_client.background import exit_on_error
from embert.server.ipc.channel import Channel, EncodeRequest, EngineStatus, Results, Submit, decode_results, encode
from embert.server.ipc.control import EngineState

log = logging.getLogger(__name__)

LAST_READS = 64  # from the socket of a lost engine, which buffers no more


class EngineConnection:
    """Lives on the event loop of one HTTP process; not thread-safe."""

    def __init__(
        self,
        state: EngineState,
        on_greeting: Callable[[], None],
        on_results: Callable[[Results], None],
        on_lost: Callable[[EngineConnection, set[int]], None],
    ) -> None:
        """The callbacks run when the engine's first status arrives, when results arrive and when the connection ends.

        `on_lost` gets the ids of the requests that had not left this process.
        """
        self.index = state.index
        self.state = state
        self.running: frozenset[int] = frozenset()  # the models that are ready here, by number
        self.status: EngineStatus | None = None  # None until the engine greets
        self.tokens = 0  # sent by this process, without results so far
        self.unsent: list[EncodeRequest] = []  # until the next tick
        self._cancelled: list[int] = []
        self._channel: Channel | None = None
        self._on_greeting, self._on_results, self._on_lost = on_greeting, on_results, on_lost
        self._loop = asyncio.get_running_loop()
        self._flush_scheduled = False
        self._flush_callback = exit_on_error(self._flush)

    @property
    def ready(self) -> bool:
        return self.state.state == "ready"

    def update(self, state: EngineState) -> None:
        """Store the state that the supervisor reports. Does not connect or disconnect."""
        self.state = state
        models = state.models.items() if state.state == "ready" else ()
        self.running = frozenset(number for number, model in models if model.state == "ready")

    def connect(self) -> None:
        """Connect to a ready engine unless already connected. If that fails, the next sweep tries again.

        The engine sends its status at once, and only then gets requests.
        """
        if self._channel is not None or not self.ready:
            return
        try:
            self._channel = Channel.connect(self.state.endpoint)
        except OSError as error:  # it has just died, or too many files are open
            log.debug("engine %d cannot be reached: %s", self.index, error)
            return
        self._loop.add_reader(self._channel.fileno(), exit_on_error(self._read))

    def disconnect(self) -> None:
        """Close the socket, drop unsent messages, and call `on_lost`. Does nothing without a connection."""
        channel = self._channel
        if channel is None:
            return
        self._loop.remove_reader(channel.fileno())
        self._loop.remove_writer(channel.fileno())
        channel.close()
        never_sent = {message.id for message in self.unsent}
        self._channel, self.status, self.tokens = None, None, 0
        self.unsent.clear()
        self._cancelled.clear()
        self._on_lost(self, never_sent)

    def read_rest(self) -> None:
        """Read the results that an engine sent before it was lost."""
        for _ in range(LAST_READS):
            if self._channel is None:
                return
            self._read()

    # --- sending ---

    def send(self, message: EncodeRequest, tokens: int) -> None:
        """Send a request of `tokens` tokens with this tick's others."""
        self.tokens += tokens
        self.unsent.append(message)
        if not self._flush_scheduled:
            self._schedule_flush()

    def cancel(self, request: int, tokens: int) -> None:
        """Tell the engine that the client has disconnected."""
        if self._channel is None:
            return
        self.tokens -= tokens
        self._cancelled.append(request)
        if not self._flush_scheduled:
            self._schedule_flush()

    def _schedule_flush(self) -> None:
        self._flush_scheduled = True
        self._loop.call_soon(self._flush_callback)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._channel is not None and (self.unsent or self._cancelled):
            if not self._channel.send(encode(Submit(self.unsent, self._cancelled))):
                self._loop.add_writer(self._channel.fileno(), exit_on_error(self._flush_rest), self._channel)
            self.unsent, self._cancelled = [], []

    def _flush_rest(self, channel: Channel) -> None:
        if channel.flush():
            self._loop.remove_writer(channel.fileno())

    # --- receiving ---

    def _read(self) -> None:
        if self._channel is None:
            return
        try:
            received = [decode_results(message) for message in self._channel.receive()]
        except (EOFError, ValueError, msgspec.MsgspecError) as error:
            if not isinstance(error, EOFError):
                log.error("malformed message from engine %d; reconnecting: %s", self.index, error)  # noqa: TRY400
            self.disconnect()
            return
        for results in received:
            greets = self.status is None
            self.status = results.status
            if greets:
                self._on_greeting()
            self._on_results(results)
