"""The page of a server with a key: what it asks, what it shows, and what it does not touch."""

from __future__ import annotations

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.server.frontend.playground.page import cells, contents, text
from tests.server.live import STAND_IN, Samples, live, until

KEY = "a-key-for-the-page"


def test_the_page_asks_for_the_key(chrome: Chrome) -> None:
    with live(*STAND_IN, "--api-key", KEY) as server:
        chrome.get(server.url)
        key = chrome.find_element(By.ID, "key")
        until(key.is_displayed, what="the question for a key")

        # No timer takes the focus away from what somebody types, and /metrics is not asked in vain.
        texts = chrome.find_element(By.ID, "texts")
        texts.send_keys("typed ")
        chrome.execute_script("document.getElementById('state').textContent = 'old'")
        until(lambda: text(chrome, "#state") == "ready", what="another round of the page's own questions")
        assert chrome.switch_to.active_element == texts
        metrics = Samples.parse(server.get("/metrics", headers={"authorization": f"Bearer {KEY}"}).text)
        assert metrics['embert_requests_total{route="/metrics",status="401"}'] <= 2  # of the figures, and of the link

        # A wrong key is reported, and can be typed over.
        key.send_keys("wrong", Keys.ENTER)
        until(lambda: text(chrome, "#key-message") == "The server does not take this key.")
        assert chrome.switch_to.active_element == key
        assert key.get_attribute("aria-invalid") == "true"

        # What a link cannot carry the key to is shown by the page, once it has the key.
        until(lambda: contents(chrome, "nav button") == ["API", "Metrics"], what="buttons in the links' place")
        assert shown(chrome, 0) == "This needs the API key."
        key.clear()
        key.send_keys(KEY, Keys.ENTER)
        until(lambda: cells(chrome), what="the matrix")
        assert not key.is_displayed()
        assert chrome.switch_to.active_element == texts
        assert "POST /embed " in shown(chrome, 0)
        assert "\nembert_tokens_total" in shown(chrome, 1)
        for tab in ("curl", "python"):
            chrome.find_element(By.ID, f"tab-{tab}").click()
            assert KEY not in text(chrome, "#snippet")
            assert "EMBERT_API_KEY" in text(chrome, "#snippet")


def shown(chrome: Chrome, button: int) -> str:
    """The text that the button opens."""
    chrome.find_elements(By.CSS_SELECTOR, "nav button")[button].click()
    dialog = chrome.find_element(By.ID, "elsewhere")
    until(dialog.is_displayed, what="the dialog")
    found = contents(chrome, "#elsewhere-text")[0]
    chrome.switch_to.active_element.send_keys(Keys.ESCAPE)
    until(lambda: not dialog.is_displayed(), what="the dialog's end")
    return found
