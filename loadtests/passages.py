"""32 passages a request, each client waiting for its answer: what indexing looks like."""

from __future__ import annotations

import random

from locust import task

from loadtests.clients import Client, passages
from loadtests.thresholds import Threshold, watch

TEXTS = passages()
watch(Threshold("32 passages", p99_ms=10_000))


class Indexing(Client):
    """One request after the other."""

    @task
    def index(self) -> None:
        """Send 32 passages."""
        first = random.randrange(0, len(TEXTS), 32)
        self.ask("32 passages", TEXTS[first : first + 32])
