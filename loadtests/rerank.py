"""Reranking: a query with 32 passages a request, each user waiting for its response."""

from __future__ import annotations

import random

from locust import task

from loadtests.thresholds import enforce
from loadtests.users import EmbeddingUser, passages, queries
from loadtests.verdict import Threshold

QUERIES, PASSAGES = queries(), passages()
enforce(Threshold("32 passages reranked", p99_ms=10_000, refused=0.05))


class Reranking(EmbeddingUser):
    """One request after the other."""

    @task
    def order(self) -> None:
        """Send a query and 32 passages."""
        first = random.randrange(0, len(PASSAGES), 32)
        self.rerank("32 passages reranked", random.choice(QUERIES), PASSAGES[first : first + 32])
