"""Ten times the rate for the middle fifth of the test: what is not answered is refused politely, and it passes."""

from __future__ import annotations

import random

from locust import LoadTestShape

from loadtests.clients import OpenLoop, options_of, queries
from loadtests.thresholds import Threshold, watch

TEXTS = queries()
TIMES = 10
watch(Threshold("query", p99_ms=5_000))


class Query(OpenLoop):
    """One text a request."""

    users = 1  # one sends --rate, ten of them ten times that
    refusals_are_fine = True

    def send(self, due: float) -> None:
        """See OpenLoop."""
        self.ask("query", [random.choice(TEXTS)], due=due)


class Spike(LoadTestShape):
    """One user, then ten, then one."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """Users, and how fast they come; None at the end."""
        options = options_of(self.runner.environment)  # type: ignore[union-attr]
        done = self.get_run_time() / float(options.run_time or 60)
        if done >= 1:
            return None
        return (TIMES, TIMES) if 0.4 <= done < 0.6 else (1, TIMES)
