"""Queries in an open loop next to bulk requests. The queries must stay fast."""

from __future__ import annotations

import random

from locust import task

from loadtests.thresholds import enforce
from loadtests.users import EmbeddingUser, OpenLoopUser, passages, queries
from loadtests.verdict import Threshold

SHORT, LONG = queries(), passages()
enforce(Threshold("query", p99_ms=1_000), Threshold("bulk", p99_ms=30_000, refused=0.5))


class Query(OpenLoopUser):
    """One text a request; one user sends all of them."""

    fixed_count = 1
    users = 1

    def send(self, due: float) -> None:
        self.embed("query", [random.choice(SHORT)], due=due)


class Bulk(EmbeddingUser):
    """32 passages a request, one request after the other."""

    @task
    def index(self) -> None:
        """Send 32 passages with bulk priority."""
        first = random.randrange(0, len(LONG), 32)
        self.embed("bulk", LONG[first : first + 32], priority="bulk")
