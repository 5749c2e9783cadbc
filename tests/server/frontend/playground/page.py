"""Reads from the page, and types into it."""

from __future__ import annotations

from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from tests.server.live import until

__all__ = ["cells", "check_legibility", "compare", "contents", "open_page", "text", "views"]


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


def views(browser: Chrome) -> list[str]:
    """The panels that are shown."""
    panels = browser.find_elements(By.CLASS_NAME, "panel")
    return [panel.get_attribute("id") or "" for panel in panels if panel.is_displayed()]


def check_legibility(browser: Chrome) -> None:
    """Contrasts, light and dark, and the width of a phone."""
    for dark in (False, True):
        look_like(browser, width=390, dark=dark)
        assert browser.execute_script(CONTRASTS) == []
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    look_like(browser, width=1280)


def look_like(browser: Chrome, *, width: int, dark: bool = False) -> None:
    """Give the window that width in pixels, and the page that choice of colors."""
    size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


# Texts with less contrast to their background than WCAG's 4.5.
CONTRASTS = """
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const rgb = (...colors) => {  // painted over one another, as the browser would
  canvas.clearRect(0, 0, 1, 1);
  for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1); }
  return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
};
const light = (color) => color.map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const low = [];
for (const element of document.querySelectorAll('body *')) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!own || !element.checkVisibility() || ['SCRIPT', 'NOSCRIPT', 'OPTION'].includes(element.tagName)) continue;
  const chain = [];
  for (let at = element; at; at = at.parentElement) chain.unshift(getComputedStyle(at).backgroundColor);
  const [a, b] = [light(rgb(...chain)), light(rgb(...chain, getComputedStyle(element).color))].sort();
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < 4.5) low.push(`${element.tagName} ${element.textContent.slice(0, 30)}: ${contrast.toFixed(2)}`);
}
return low;
"""
