"""Queries in an open loop beside bulk requests: the queries are the ones with a promise."""

from __future__ import annotations

import random

from locust import task

from loadtests.clients import Client, OpenLoop, passages, queries
from loadtests.thresholds import Threshold, watch

SHORT, LONG = queries(), passages()
watch(Threshold("query", p99_ms=1_000), Threshold("bulk", p99_ms=30_000))


class Query(OpenLoop):
    """One text a request; one user makes all of them."""

    fixed_count = 1
    users = 1

    def send(self, due: float) -> None:
        """See OpenLoop."""
        self.ask("query", [random.choice(SHORT)], due=due)


class Bulk(Client):
    """32 passages a request, one after the other."""

    refusals_are_fine = True

    @task
    def index(self) -> None:
        """Send 32 passages, to be worked on when nothing else is there."""
        first = random.randrange(0, len(LONG), 32)
        self.ask("bulk", LONG[first : first + 32], priority="bulk")
