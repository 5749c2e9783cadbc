"""Indexing: 32 passages a request, each user waiting for its response."""

from __future__ import annotations

import random

from locust import task

from loadtests.thresholds import enforce
from loadtests.users import EmbeddingUser, passages
from loadtests.verdict import Threshold

TEXTS = passages()
enforce(Threshold("32 passages", p99_ms=10_000))


class Indexing(EmbeddingUser):
    """One request after the other."""

    @task
    def index(self) -> None:
        first = random.randrange(0, len(TEXTS), 32)
        self.embed("32 passages", TEXTS[first : first + 32])
