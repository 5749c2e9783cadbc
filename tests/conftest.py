"""The server that most tests share."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from hypothesis import settings

from tests.server.live import Live, live

# Properties are about answers, not about time: a machine that stops for a moment must not fail one.
settings.register_profile("embert", deadline=None)
settings.load_profile("embert")


@pytest.fixture(scope="session")
def server() -> Iterator[Live]:
    """`embert serve` with the default model, in float32 on any machine; default options, but for ids on all routes."""
    with live("--device", "cpu", "--accept-token-ids") as running:
        yield running


@pytest.fixture(scope="session")
def http(server: Live) -> Iterator[httpx.Client]:
    """A client of `server`."""
    with server.client() as client:
        yield client
