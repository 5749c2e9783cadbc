"""The first message to each child: its role and its configuration."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from embert.engine.model import Model
from embert.server.config import ServeConfig
from embert.server.ipc.control import EngineState, StartEngine, StartHttp, StartModel
from embert.server.supervisor.child import Child

__all__ = ["PlannedModel", "StartMessages"]


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that is to be served, before any process has loaded it. Its number is its place among the models."""

    start: StartModel
    model: Model
    devices: tuple[str, ...]  # an engine process on each of them holds it


@dataclass(frozen=True, slots=True)
class StartMessages:
    """What all of them have."""

    config: ServeConfig
    models: Sequence[PlannedModel]
    broken: Mapping[str, str]  # models that cannot be read, by name, with the reason
    memory_fd: int
    counters_fd: int
    traces_url: str | None  # of the collector; None: no traces
    instance: str = field(default_factory=lambda: str(uuid.uuid4()))  # a unique name of this server

    def engine(
        self,
        child: Child,
        devices: Sequence[str],
        numbers: Sequence[int],
        *,
        one_by_one: bool,
    ) -> StartEngine:
        """Load these models of the server; `devices` are those of all engines."""
        return StartEngine(
            config=self.config,
            models=[self.models[number].start for number in numbers],
            one_by_one=one_by_one,
            names=[model.start.name for model in self.models],
            memory_fd=self.memory_fd,
            index=child.index,
            device=devices[child.index],
            endpoint=child.endpoint,
            counters_fd=self.counters_fd,
            engines=len(devices),
            traces_url=self.traces_url,
            instance=self.instance,
        )

    def http(
        self,
        child: Child,
        sockets: Sequence[socket.socket],
        metrics_socket: socket.socket | None,
        engines: list[EngineState],
    ) -> StartHttp:
        """Listen on these sockets, which the child has inherited."""
        return StartHttp(
            config=self.config,
            models=[model.start for model in self.models],
            broken=dict(self.broken),
            memory_fd=self.memory_fd,
            socket_fds=[sock.fileno() for sock in sockets],
            metrics_fd=metrics_socket.fileno() if metrics_socket is not None else None,
            http_index=child.index,
            counters_fd=self.counters_fd,
            engines=engines,
            traces_url=self.traces_url,
            instance=self.instance,
        )
