"""Single short texts in an open loop: what searching looks like."""

from __future__ import annotations

import random

from loadtests.clients import OpenLoop, queries
from loadtests.thresholds import Threshold, watch

TEXTS = queries()
watch(Threshold("query", p99_ms=250))


class Query(OpenLoop):
    """One text a request."""

    def send(self, due: float) -> None:
        """See OpenLoop."""
        self.ask("query", [random.choice(TEXTS)], due=due)
