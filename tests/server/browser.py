"""A headless Chromium, where Debian's `chromium` and `chromium-driver` are installed."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

__all__ = ["browse"]


@contextlib.contextmanager
def browse(*, dark: bool = False, width: int = 1280, height: int = 1000) -> Iterator[Chrome]:
    """A browser with a window of that size, closed at the end; the console's messages are kept for `get_log`."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    options = ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--window-size={width},{height}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with Chrome(options, Service(driver)) as browser:
        if dark:
            features = [{"name": "prefers-color-scheme", "value": "dark"}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        yield browser
