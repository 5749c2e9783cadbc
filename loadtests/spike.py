"""Ten times the rate during the middle fifth of the test. The server may refuse requests, but must not fail them."""

from __future__ import annotations

import random

from locust import LoadTestShape

from loadtests.thresholds import enforce
from loadtests.users import OpenLoopUser, options_of, queries
from loadtests.verdict import Threshold

TEXTS = queries()
TIMES = 10
enforce(Threshold("query", p99_ms=5_000, refused=0.75))


class Query(OpenLoopUser):
    """One text a request."""

    users = 1  # one user sends --rate, ten users ten times that

    def send(self, due: float) -> None:
        self.embed("query", [random.choice(TEXTS)], due=due)


class Spike(LoadTestShape):
    """One user, then ten, then one."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """Return the number of users and the spawn rate; None at the end."""
        options = options_of(self.runner.environment)  # type: ignore[union-attr]
        done = self.get_run_time() / float(options.run_time or 60)
        if done >= 1:
            return None
        return (TIMES, TIMES) if 0.4 <= done < 0.6 else (1, TIMES)
