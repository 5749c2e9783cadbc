"""A model that is to be served."""

from __future__ import annotations

from dataclasses import dataclass

from embert.engine.model import Model
from embert.server.ipc.control import StartModel


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that is to be served, before any process has loaded it. Its number is its index among the models."""

    start: StartModel
    model: Model
    devices: tuple[str, ...]  # an engine process on each of them holds it
