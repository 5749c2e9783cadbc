"""Answers that are long, many, cut, or written from right to left; and the keyboard."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.server.frontend.playground.page import cells, compare, contents, standing_in, text
from tests.server.live import Live, until

HEIGHT = "return document.documentElement.scrollHeight"


@pytest.fixture(scope="module")
def page(chrome: Chrome, server: Live) -> Iterator[Chrome]:
    with standing_in(chrome, server.url):
        until(lambda: cells(chrome), what="the first matrix")
        yield chrome


def test_a_long_text_is_cut_and_does_not_fill_the_page(page: Chrome) -> None:
    page.execute_script("window.cut = 1")
    compare(page, ["short", "word " * 6000])
    page.execute_script("window.cut = 0")
    assert text(page, "#cut") == "Text 2 was cut to 256 of 6 002 tokens."
    pair = text(page, "#pair")
    assert "“short” (3 tokens)" in pair
    assert "(cut to 256 of 6 002 tokens)" in pair
    for tab in ("curl", "python", "json"):
        page.find_element(By.ID, f"tab-{tab}").click()
        assert page.execute_script(HEIGHT) < 2000
    page.find_element(By.ID, "tab-curl").click()


def test_many_texts_fit_their_box(page: Chrome) -> None:
    texts = [f"text {i} of a long list" for i in range(50)]
    compare(page, texts)
    assert len(cells(page)) == 2500
    width, room, size = page.execute_script("""
        const box = document.querySelector('.scroll');
        return [box.scrollWidth, box.clientWidth, getComputedStyle(box.querySelector('td[data-row]')).fontSize]""")
    assert width <= room
    assert float(size.removesuffix("px")) >= 10
    compare(page, ["a", "b"])


def test_every_value_is_reached_with_the_keyboard(page: Chrome) -> None:
    compare(page, ["a cat", "a kitten", "a tax form"])
    (reached,) = page.find_elements(By.CSS_SELECTOR, "#matrix [tabindex='0']")  # one stop for Tab
    reached.send_keys(Keys.ARROW_DOWN)
    page.switch_to.active_element.send_keys(Keys.END)
    cell = page.switch_to.active_element
    assert (cell.get_attribute("data-row"), cell.get_attribute("data-column")) == ("1", "2")
    said = text(page, "#pair")
    assert said.startswith(cell.text[:3])
    assert "“a kitten”" in said
    assert said.index("“a kitten”") < said.index("“a tax form”")


def test_right_to_left(page: Chrome) -> None:
    """A label keeps its beginning, which is on the right; two texts in a line stand in their order."""
    arabic = "هذا نص عربي طويل يتحدث عن أشياء كثيرة ومختلفة لكي يكون أطول من العمود"
    compare(page, [arabic, "שלום עולם"])
    script = """
        const [label] = document.querySelectorAll('#matrix tbody th bdi');
        const first = (node) => {
            const range = document.createRange(); range.setStart(node.firstChild, 0); range.setEnd(node.firstChild, 3);
            return range.getBoundingClientRect();
        };
        const box = label.getBoundingClientRect();
        const [a, b] = [...document.querySelectorAll('#pair bdi')].map(first);
        const strings = [...document.querySelectorAll('#snippet bdi')].map(first);
        return [first(label).right - box.right, a.top < b.top || a.left < b.left, strings.map((each) => each.left)]"""
    beyond_the_box, in_order, strings = page.execute_script(script)
    assert beyond_the_box < 1
    assert in_order
    assert len(strings) == 2
    assert strings[0] < strings[1]


def test_the_answer_and_a_vector_are_shown_and_copied(page: Chrome, http: httpx.Client) -> None:
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
