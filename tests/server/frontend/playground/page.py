"""Reads from the page, and types into it."""

from __future__ import annotations

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from tests.server.live import until


def text(browser: Chrome, selector: str) -> str:
    """The visible text of the first such element."""
    return browser.find_element(By.CSS_SELECTOR, selector).text


def contents(browser: Chrome, selector: str) -> list[str]:
    """The text of every such element, all at one moment: the page may redraw between two questions."""
    script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
    found: list[str] = browser.execute_script(script, selector)
    return found


def cells(browser: Chrome, table: str = "#matrix") -> list[float]:
    """The numbers of a table, row by row."""
    return [float(cell) for cell in contents(browser, f"{table} td[data-row]")]


def compare(browser: Chrome, texts: list[str]) -> None:
    """Put the texts into the form, click, and wait for their matrix."""
    browser.execute_script("document.getElementById('texts').value = arguments[0]", "\n".join(texts))
    browser.execute_script("document.querySelector('#matrix tbody').replaceChildren()")
    browser.find_element(By.ID, "go").click()
    until(lambda: len(contents(browser, "#matrix tbody th")) == len(texts), what="the texts' matrix")


def open_page(browser: Chrome, url: str) -> None:
    """Load the page, with an empty console."""
    browser.get("about:blank")  # another hash would not load the page
    browser.get_log("browser")  # type: ignore[no-untyped-call]  # what others left there
    browser.get(url)
