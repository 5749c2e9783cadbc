"""A long run of `mixed` and requests of all sizes. Nothing may fail, and no engine may be lost."""

from __future__ import annotations

import random

from locust import task

from loadtests.mixed import LONG, SHORT, Bulk, Query
from loadtests.users import EmbeddingUser

__all__ = ["AnySize", "Bulk", "Query"]


class AnySize(EmbeddingUser):
    """Requests of all sizes, with pauses."""

    def wait_time(self) -> float:
        """Return a pause of up to a second."""
        return random.random()

    @task
    def some(self) -> None:
        """Send 1 to 200 texts, queries and passages."""
        self.embed("some", random.choices(SHORT + LONG, k=round(200 ** random.random())))
