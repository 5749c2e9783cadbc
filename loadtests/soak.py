"""The mix of `mixed` and a few of everything else, for long; nothing may fail, and no engine may be lost."""

from __future__ import annotations

import random

from locust import task

from loadtests.clients import Client
from loadtests.mixed import LONG, SHORT, Bulk, Query

__all__ = ["Anything", "Bulk", "Query"]


class Anything(Client):
    """Requests of all sizes, with a pause now and then."""

    refusals_are_fine = True

    def wait_time(self) -> float:
        """Up to a second."""
        return random.random()

    @task
    def some(self) -> None:
        """Send 1 to 200 texts of both kinds."""
        self.ask("some", random.choices(SHORT + LONG, k=round(200 ** random.random())))
