"""Each view of a model that has its task, and the tabs between them."""

from __future__ import annotations

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By

from tests.server.frontend.playground.page import contents, open_page, text
from tests.server.live import Live, until


def ask(chrome: Chrome, server: Live, view: str, **fields: str) -> None:
    """Open the view of this server's page, fill its form, send it, and look at what it shows."""
    open_page(chrome, f"{server.url}/#{view}")
    result = chrome.find_element(By.CSS_SELECTOR, f"#view-{view} .result")
    until(result.is_displayed, what="the response to what stands in the form")
    send(chrome, view, **fields)
    assert result.is_displayed(), text(chrome, f"#view-{view} .message")
    assert chrome.get_log("browser") == []  # type: ignore[no-untyped-call]


def send(chrome: Chrome, view: str, **fields: str) -> None:
    """Fill the form and send it."""
    for name, value in fields.items():
        chrome.execute_script("document.getElementById(arguments[0]).value = arguments[1]", f"{view}-{name}", value)
    chrome.find_element(By.CSS_SELECTOR, f"#view-{view} button.main").click()
    until(lambda: not chrome.find_elements(By.CSS_SELECTOR, f"#view-{view} [aria-disabled]"), what="its response")


def values(chrome: Chrome, view: str) -> list[float]:
    """The numbers of a list with bars."""
    script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.value)"
    return [float(value) for value in chrome.execute_script(script, f"#{view}-list data")]


def test_documents_by_a_reranker(chrome: Chrome, reranker: Live) -> None:
    query, documents = "Why do cats purr?", ["a tax form", "cats purr", "kitten " * 400]
    ask(chrome, reranker, "rerank", query=query, documents="\n".join(documents))
    ranking = reranker.post("/rerank", {"query": query, "texts": documents}).json()
    assert values(chrome, "rerank") == pytest.approx([each["score"] for each in ranking], abs=1e-6)
    names = contents(chrome, "#rerank-list .name p:first-child")
    assert [name[:9] for name in names] == [documents[each["index"]][:9] for each in ranking]
    assert text(chrome, "#rerank-note").endswith("1 of 3 documents cut, to 128 tokens with the query.")
    assert not chrome.find_elements(By.CSS_SELECTOR, "#views [role=tab]:not([hidden]) + [role=tab]")  # its only view


def test_labels_by_a_classifier(chrome: Chrome, classifier: Live) -> None:
    ask(chrome, classifier, "classify", text="what a day")
    labels = classifier.post("/predict", {"inputs": "what a day"}).json()
    assert values(chrome, "classify") == pytest.approx([each["score"] for each in labels], abs=1e-6)
    assert contents(chrome, "#classify-list p") == [each["label"] for each in labels]


def test_words_by_a_model_of_sparse_vectors(chrome: Chrome, three_heads: Live) -> None:
    sentence = "The parcel was delivered to our old address, the parcel."
    ask(chrome, three_heads, "sparse", text=sentence)
    (weights,) = three_heads.post("/embed_sparse", {"inputs": sentence}).json()
    weights.sort(key=lambda each: -each["value"])
    assert values(chrome, "sparse") == pytest.approx([each["value"] for each in weights], abs=1e-6)
    words = [three_heads.post("/decode", {"ids": [each["index"]]}).json()[0] for each in weights]
    assert contents(chrome, "#sparse-list p") == words
    assert text(chrome, "#sparse-note") == f"14 tokens, {len(weights)} weights"
