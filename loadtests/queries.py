"""Search: single short texts in an open loop."""

from __future__ import annotations

import random

from loadtests.thresholds import enforce
from loadtests.users import OpenLoopUser, queries
from loadtests.verdict import Threshold

TEXTS = queries()
enforce(Threshold("query", p99_ms=250))


class Query(OpenLoopUser):
    """One text a request."""

    def send(self, due: float) -> None:
        self.embed("query", [random.choice(TEXTS)], due=due)
