"""One browser for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium.webdriver import Chrome

from tests.server.browser import browse


@pytest.fixture(scope="package")
def chrome() -> Iterator[Chrome]:
    """A browser; a module loads what it needs."""
    with browse() as browser:
        yield browser
