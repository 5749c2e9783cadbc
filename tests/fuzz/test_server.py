"""A short run against a real server: what `python -m tests.fuzz` does for longer and more strictly."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.campaign import Campaign, fetch_routes, grown, memory, peaks
from tests.fuzz.cases import SOUND, Maker
from tests.fuzz.client import Limits
from tests.server.live import STAND_IN, Live, live
from tests.server.models import build_classifier

REQUESTS = 300
PEAK = 400_000_000  # bytes: --max-held-bytes, and what parsing takes
MEMORY = 200_000_000  # the command has a stricter limit, for a machine with nothing else to do


# Of a model of scores and vectors, of one that labels freely, and of one that classifies tokens.
LABELS = (("relevance",), ("entailment", "neutral", "contradiction"), ("O", "B-PER", "I-PER"))


@pytest.fixture
def fuzzed(seed: int, tmp_path: Path) -> Iterator[Live]:
    """A server of the model that the seed chooses."""
    labels = LABELS[seed % len(LABELS)]
    tokens = "O" in labels
    folder = build_classifier(tmp_path / "model", *labels, tokens=tokens)
    options = (str(folder), *(() if tokens else ("--pooling", "mean")), "--request-timeout", "5")
    with live(*options, *STAND_IN, env={"STAND_IN_ORDERS": "no"}) as server:
        yield server


@pytest.mark.parametrize("seed", [0, secrets.randbelow(1 << 32)], ids=["fixed", "random"])
def test_nothing_is_found(fuzzed: Live, seed: int) -> None:
    print(f"seed {seed}")
    routes = fetch_routes(fuzzed.url)
    maker = Maker(routes, seed)
    # Nothing here is about speed: a response is late when it would never come.
    limits = Limits(timeout_s=5, slack_s=55)
    campaign = Campaign(("127.0.0.1", fuzzed.ports[0]), maker, limits, most_findings=5, tell=print)

    async def run() -> None:
        await campaign.warm(routes)
        await campaign.run(REQUESTS)

    before = memory(fuzzed.process.pid)
    asyncio.run(run())
    reports = [finding.report() for finding in campaign.findings]
    assert not reports, f"python -m tests.fuzz --seed {seed} --only {campaign.findings[0].case.index}"
    assert campaign.requests >= REQUESTS
    served = sum(campaign.statuses[status] for status in SOUND)  # a busy machine may say 503
    assert served > REQUESTS / 4, campaign.statuses
    assert set(campaign.kinds) == {"json", "multiplied", "head", "chunked", "upgrade", "pipeline", "cut", "bytes"}
    assert not grown(before, memory(fuzzed.process.pid), MEMORY)
    assert not grown(before, peaks(before), PEAK)
