"""A model that is to be served: what is known of it before any process has loaded it."""

from __future__ import annotations

from dataclasses import dataclass

from embert.engine.model import Model
from embert.server.ipc.control import StartModel

__all__ = ["PlannedModel"]


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """Its number is its place among the models of the server."""

    start: StartModel
    model: Model
    devices: tuple[str, ...]  # an engine process on each of them holds it
