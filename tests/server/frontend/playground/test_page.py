"""Similarity, times, code and live figures, as a person types, clicks and sees them."""

from __future__ import annotations

import base64
import json
import re
import shlex
import subprocess
import sys
from typing import Any

import httpx
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.server.frontend.playground.page import cells, compare, contents, open_page, text
from tests.server.live import Live, until

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def page(chrome: Chrome, server: Live) -> Chrome:
    open_page(chrome, server.url)
    until(lambda: cells(chrome), what="the first matrix")
    return chrome


# --- the response ---


def test_browsers_get_the_page_and_others_a_hint(http: httpx.Client) -> None:
    page = http.get("/", headers=HTML)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert len(page.content) < 68_000  # of nine views, in one document with all that they need
    assert http.head("/", headers=HTML).status_code == 200
    hint = http.get("/")
    assert hint.headers["content-type"].startswith("text/plain")
    assert "/docs" in hint.text
    for refused in ("text/html;q=0", "text/html;q=0.1, text/plain", "*/*"):
        assert http.get("/", headers={"accept": refused}).headers["content-type"].startswith("text/plain")
    assert http.post("/", json={"inputs": "a"}, headers=HTML).json()[0]


def test_the_page_is_self_contained(http: httpx.Client) -> None:
    page = http.get("/", headers=HTML)
    icon, *links = re.findall(r"""(?:src|href)=["']([^"']*)""", page.text)
    assert base64.b64decode(icon.removeprefix("data:image/png;base64,"), validate=True).startswith(b"\x89PNG")
    assert links == ["docs", "metrics", "docs"]
    assert not re.findall(r"https?://(?!\$)", page.text)
    policy = page.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize(
    ("prefix", "base"),
    [("/embert", "/embert/"), ("/a/b/", "/a/b/"), ("", ""), ("/", ""), ("//evil.com", ""), ('/a"><script>', "")],
)
def test_links_of_the_page_behind_a_path(http: httpx.Client, prefix: str, base: str) -> None:
    page = http.get("/", headers={**HTML, "x-forwarded-prefix": prefix})
    assert re.findall(r'<base href="([^"]*)">', page.text) == [base] * bool(base)
    assert "x-forwarded-prefix" in page.headers["vary"]


# --- what a person does ---


def test_a_heat_map_of_what_was_typed(page: Chrome, http: httpx.Client) -> None:
    until(lambda: text(page, "#state") == "ready", what="the state")
    assert text(page, "#model") == http.get("/info").json()["served_model_name"]
    texts = ["a cat on a mat", "<b>the kitten</b> & 'the' \"rug\"", "interest rates", "Zinsen 利率 🏦"]
    compare(page, texts)
    vectors = http.post("/embed", json={"inputs": texts}).json()
    expected = [sum(x * y for x, y in zip(a, b, strict=True)) for a in vectors for b in vectors]
    assert cells(page) == pytest.approx(expected, abs=0.0051)
    script = "return [...document.querySelectorAll('#matrix td')].map((cell) => cell.style.getPropertyValue('--heat'))"
    heats = [float(heat.rstrip("%")) for heat in page.execute_script(script) if heat]
    assert heats == pytest.approx([100 * min(1, max(0, value)) for value in expected], abs=0.51)
    colors = {cell.value_of_css_property("background-color") for cell in page.find_elements(By.TAG_NAME, "td")}
    assert len(colors) > 4
    assert text(page, "#pair").startswith("Closest, ")


def test_the_response_and_a_vector_are_shown_and_copied(page: Chrome, http: httpx.Client) -> None:
    texts = ["a cat", "a kitten"]
    compare(page, texts)
    # Only what asks for it may read the clipboard: keep what is written.
    page.execute_script(
        "Object.defineProperty(navigator, 'clipboard', {value: {writeText: (text) => { window.copied = text; }}})"
    )

    def copied(tab: str) -> str:
        page.find_element(By.ID, f"tab-{tab}").click()
        page.find_element(By.ID, "copy").click()
        until(lambda: text(page, "#copied") == "copied")
        found: str = page.execute_script("return window.copied")
        return found

    expected = http.post("/v1/embeddings", json={"input": texts}).json()
    assert json.loads(copied("json")) | {"id": expected["id"]} == expected
    assert json.loads(copied("vector")) == expected["data"][0]["embedding"]
    page.find_element(By.CSS_SELECTOR, "#which option:nth-child(2)").click()
    assert json.loads(contents(page, "#snippet")[0]) == expected["data"][1]["embedding"]
    page.find_element(By.ID, "tab-curl").click()


def test_the_snippets_run(page: Chrome) -> None:
    texts = ['it\'s a "quoted" \\ text $HOME', "`date` 🏦"]
    compare(page, texts)
    page.find_element(By.ID, "tab-curl").click()
    curl = shlex.split(text(page, "#snippet").replace("\\\n", " "))
    ran = subprocess.run(curl, capture_output=True, text=True, check=True)
    assert ran.stdout.count('"embedding":[') == 2, ran.stdout
    page.find_element(By.ID, "tab-curl").send_keys(Keys.ARROW_RIGHT)
    assert page.switch_to.active_element.get_attribute("id") == "tab-python"
    python = text(page, "#snippet")
    ran = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, check=True)
    printed = [float(value) for value in re.findall(r"-?\d+\.\d*", ran.stdout)]
    assert printed == pytest.approx(cells(page), abs=0.011)


def test_errors_are_shown(page: Chrome) -> None:
    page.find_element(By.ID, "texts").clear()
    page.find_element(By.ID, "texts").send_keys(Keys.CONTROL, Keys.ENTER)
    until(lambda: text(page, "#message"))
    for section in ("result", "timing", "code"):  # it belonged to another request
        assert not page.find_element(By.ID, section).is_displayed()
    compare(page, ["a", "b"])
    assert text(page, "#message") == ""
    page.execute_script("document.getElementById('dimensions').removeAttribute('max')")
    page.find_element(By.ID, "dimensions").send_keys("1000")
    page.find_element(By.ID, "go").click()
    until(lambda: "1000" in text(page, "#message"))
    page.find_element(By.ID, "dimensions").clear()


def test_every_control_has_a_name_and_the_console_is_silent(page: Chrome) -> None:
    nameless = page.execute_script("""
        return [...document.querySelectorAll('input, select, textarea, button')].filter(
            (control) => !control.labels?.length && !control.textContent.trim()).map((control) => control.outerHTML)""")
    assert nameless == []
    console: Any = page.get_log("browser")  # type: ignore[no-untyped-call]
    assert [entry for entry in console if "422" not in entry["message"]] == []
