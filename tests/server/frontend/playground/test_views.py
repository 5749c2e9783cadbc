"""The views of a model's other tasks. What the default model does not have is answered by a stand-in for `fetch`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.server.frontend.playground.page import CONTRASTS, cells, contents, look_like, standing_in, text
from tests.server.live import Live, until

VIEWS = ["similarity", "search", "rerank", "classify", "sparse", "match"]


@pytest.fixture(scope="module")
def page(chrome: Chrome, server: Live) -> Iterator[Chrome]:
    with standing_in(chrome, f"{server.url}/#rerank"):
        chrome.get_log("browser")  # type: ignore[no-untyped-call]  # what others left there
        until(lambda: contents(chrome, "#rerank-list li"), what="the first view")
        yield chrome


def show(page: Chrome, view: str, **fields: str) -> None:
    """Open the view, fill its form, and send it."""
    page.find_element(By.ID, f"tab-{view}").click()
    until(page.find_element(By.ID, f"view-{view}").is_displayed, what=view)
    until(lambda: not page.find_elements(By.CSS_SELECTOR, f"#view-{view} [aria-disabled]"), what="its first answer")
    script = "document.getElementById(arguments[0]).value = arguments[1]"
    for name, value in fields.items():
        page.execute_script(script, f"{view}-{name}", value)
    page.execute_script("window.asked = []")
    page.find_element(By.CSS_SELECTOR, f"#view-{view} button.main").click()
    until(lambda: not page.find_elements(By.CSS_SELECTOR, f"#view-{view} [aria-disabled]"), what="its answer")


def asked(page: Chrome, route: str) -> list[Any]:
    """The bodies that were sent to that route since `show`."""
    return [body for path, body in page.execute_script("return window.asked") if path == route]


def test_tabs_follow_the_address_and_the_keyboard(page: Chrome) -> None:
    selected = "return document.querySelector('#views [aria-selected=true]').id"
    assert page.execute_script(selected) == "tab-rerank"
    page.find_element(By.ID, "tab-rerank").send_keys(Keys.END)
    until(lambda: page.execute_script(selected) == "tab-match")
    assert page.current_url.endswith("#match")
    page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    until(lambda: page.execute_script(selected) == "tab-similarity")
    until(lambda: cells(page), what="the matrix")
    visible = [
        panel.get_attribute("id") for panel in page.find_elements(By.CLASS_NAME, "panel") if panel.is_displayed()
    ]
    assert visible == ["view-similarity"]
    page.back()
    until(lambda: page.execute_script(selected) == "tab-match")


def test_a_search(page: Chrome, http: httpx.Client) -> None:
    query, documents = "sleeping animals", ["the rent is due", "a cat naps on the sofa", "dogs rest"]
    show(page, "search", query=query, documents="\n".join(documents))
    bodies = asked(page, "/v1/embeddings")
    assert [(body["input"], body["input_type"]) for body in bodies] == [([query], "query"), (documents, "document")]
    answer = http.post("/similarity", json={"inputs": {"source_sentence": query, "sentences": documents}})
    cosines = dict(zip(documents, answer.json(), strict=True))
    ranking = sorted(documents, key=lambda document: -cosines[document])
    assert contents(page, "#search-list .name p:first-child") == ranking
    shown = [float(value) for value in contents(page, "#search-list data")]
    assert shown == pytest.approx([cosines[document] for document in ranking], abs=0.001)
    assert text(page, "#search-list .hint").startswith("document ")
    show(page, "search", query="")
    assert text(page, "#view-search .message") == "Write a query and at least one document."


def test_documents_best_first(page: Chrome) -> None:
    show(page, "rerank", query="a question", documents="0.25 one\n0.75 <b>two</b>\n0.00003 three")
    assert asked(page, "/v1/rerank") == [
        {"query": "a question", "documents": ["0.25 one", "0.75 <b>two</b>", "0.00003 three"]}
    ]
    assert contents(page, "#rerank-list .name p:first-child") == ["0.75 <b>two</b>", "0.25 one", "0.00003 three"]
    assert contents(page, "#rerank-list data") == ["0.750", "0.250", "3.0e-5"]
    widths = "return [...document.querySelectorAll('#rerank-list i')].map((bar) => parseFloat(bar.style.width))"
    assert page.execute_script(widths) == pytest.approx([75, 25, 0.003])
    assert text(page, "#rerank-list .hint") == "document 2 · 13 tokens"
    assert text(page, "#rerank-note") == "The query has 4 tokens."
    page.execute_script("window.cut = 1")
    show(page, "rerank", documents="0.5 short\n0.1 " + "word " * 400)
    page.execute_script("window.cut = 0")
    assert contents(page, "#rerank-list .hint")[1] == "document 2 · 405 tokens, cut: 256 with the query"
    assert "1 of 2 documents cut, to 256 tokens with the query." in text(page, "#rerank-note")
    show(page, "rerank", documents="")
    assert text(page, "#view-rerank .message") == "Write a query and at least one document."
    assert not page.find_element(By.ID, "rerank-list").is_displayed()


def test_labels(page: Chrome) -> None:
    show(page, "classify", text="what a day")
    assert asked(page, "/predict") == [{"inputs": "what a day"}]
    assert contents(page, "#classify-list p") == ["joy", "anger", "fear"]
    assert contents(page, "#classify-list data") == ["0.900", "0.100", "4.0e-5"]
    assert text(page, "#classify-note") == "5 tokens"


def test_sparse_vectors_are_weighted_words(page: Chrome) -> None:
    show(page, "sparse", text="hello, world")
    assert asked(page, "/embed_sparse") == [{"inputs": "hello, world"}]
    assert contents(page, "#sparse-list p") == ["hello", "world", "[CLS]"]
    assert contents(page, "#sparse-list data") == ["1.500", "0.750", "0.250"]
    assert text(page, "#sparse-note") == "5 tokens, 3 weights"
    page.find_element(By.ID, "tab-python").click()
    assert '"inputs": "hello, world"' in text(page, "#snippet")
    page.find_element(By.ID, "tab-curl").click()


def test_a_query_matched_with_a_document(page: Chrome, http: httpx.Client) -> None:
    query, document = "red cat", "the cat"
    show(page, "match", query=query, document=document)
    bodies = asked(page, "/v1/embeddings")
    assert [(body["input"], body["input_type"]) for body in bodies] == [([query], "query"), ([document], "document")]
    assert {tuple(body["embedding_types"]) for body in bodies} == {("colbert",)}
    rows, columns = http.post("/tokenize", json={"inputs": [query, document]}).json()
    expected = [[math.cos(a["id"] - b["id"]) for b in columns] for a in rows]
    assert cells(page, "#match-grid") == pytest.approx([value for row in expected for value in row], abs=0.0051)
    assert contents(page, "#match-grid tbody th[scope]") == ["[CLS]", "red", "cat", "[SEP]"]
    assert contents(page, "#match-grid thead th") == ["query", "best match", "[CLS]", "the", "cat", "[SEP]"]
    best = [row.index(max(row)) for row in expected]
    marks = page.execute_script("return [...document.querySelectorAll('td.best')].map((td) => +td.dataset.column)")
    assert marks == best
    assert contents(page, "#match-grid .found")[2] == "cat 1.00"
    assert text(page, "#match-sum").startswith(f"MaxSim {sum(map(max, expected)):.3f}:")
    page.find_element(By.CSS_SELECTOR, "#match-grid td[tabindex='0']").send_keys(Keys.ARROW_RIGHT)
    assert text(page, "#match-cell").startswith(f"{expected[0][1]:.3f}: “[CLS]” and “the”")

    show(page, "match", document="the cat!")  # of which one vector is left out
    assert contents(page, "#match-grid thead th")[2:] == ["[CLS]", "the", "cat", "!"]
    assert contents(page, "#match-grid tbody th[scope]") == ["[CLS]", "red", "cat", "[SEP]"]


def test_the_views_are_named_legible_and_narrow_enough(page: Chrome) -> None:
    overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for view in VIEWS[1:]:
        show(page, view, **({"documents": "0.9 one\n0.1 two"} if view in ("search", "rerank") else {}))
        for dark in (False, True):
            look_like(page, width=390, dark=dark)
            assert page.execute_script(CONTRASTS) == [], view
        assert page.execute_script(overflow) <= 0, view
        nameless = page.execute_script("""
            return [...document.querySelectorAll('input, select, textarea, button')].filter(
                (control) => !control.labels?.length && !control.textContent.trim()).map((control) => control.id)""")
        assert nameless == []
        look_like(page, width=1280)
    assert page.get_log("browser") == []  # type: ignore[no-untyped-call]


def test_only_the_tasks_of_the_model_have_views(page: Chrome, server: Live) -> None:
    def views(info: str) -> list[str]:
        with standing_in(page, f"{server.url}/#match", f"window.info = {info};"):
            until(lambda: text(page, "#model"), what="what is served")
        tabs = page.find_elements(By.CSS_SELECTOR, "#views [role=tab]")
        panels = [
            panel.get_attribute("id") for panel in page.find_elements(By.CLASS_NAME, "panel") if panel.is_displayed()
        ]
        assert len(panels) == 1
        return [str(panels[0]), *(tab.text for tab in tabs if tab.is_displayed())]

    # A reranker's one label is its score.
    reranker = "{tasks: ['tokens', 'classify', 'rerank'], model_type: {reranker: {}}, dimensions: 0}"
    assert views(reranker) == ["view-rerank"]
    assert "dimensions" not in text(page, "#facts")
    assert views("{tasks: ['embed', 'sparse']}") == ["view-similarity", "Similarity", "Search", "Sparse"]
