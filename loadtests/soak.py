"""A long run of `mixed` and requests of all sizes. Nothing may fail, and no engine may be lost."""

from __future__ import annotations

import random

from locust import task

from loadtests.mixed import LONG, SHORT
from loadtests.mixed import Bulk as Bulk  # users of this scenario, too
from loadtests.mixed import Query as Query
from loadtests.users import EmbeddingUser


class AnySize(EmbeddingUser):
    """Requests of all sizes, with pauses."""

    def wait_time(self) -> float:
        """Return a pause of up to a second."""
        return random.random()

    @task
    def some(self) -> None:
        """Send 1 to 200 texts, queries and passages."""
        self.embed("some", random.choices(SHORT + LONG, k=round(200 ** random.random())))
