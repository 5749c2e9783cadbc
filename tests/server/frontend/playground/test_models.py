"""The page of a server of several models: one is chosen, and asked by its name."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from tests.server.frontend.playground.page import cells, contents, open_page, text, views
from tests.server.live import Live, live, until
from tests.server.models import build_classifier, copy_model, edit_json, write_config


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """An embedder with a prompt, a reranker whose name has a slash, and one that fails."""
    folder = tmp_path_factory.mktemp("two")
    dense, broken = copy_model(folder / "dense"), copy_model(folder / "broken")
    edit_json(dense / "config_sentence_transformers.json", prompts={"query": "query: "})
    (broken / "config.json").unlink()
    (broken / "config.json").write_text("{")
    folders: dict[str, Path] = {"dense": dense, "org/rank": build_classifier(folder / "rank", "relevance", seed=37)}
    models = [{"name": name, "model": str(path)} for name, path in {**folders, "broken": broken}.items()]
    with live("--config", write_config(folder / "models.toml", *models), "--device", "cpu") as running:
        yield running


@pytest.fixture
def page(chrome: Chrome, two: Live) -> Chrome:
    open_page(chrome, two.url)
    until(lambda: cells(chrome), what="the first matrix")
    return chrome


def choose(page: Chrome, name: str) -> None:
    Select(page.find_element(By.ID, "chooser")).select_by_value(name)


def test_a_model_is_chosen(page: Chrome, two: Live) -> None:
    options = page.find_elements(By.CSS_SELECTOR, "#chooser option")
    assert [option.text for option in options] == ["dense", "org/rank", "broken (failed)"]
    assert [option.is_enabled() for option in options] == [True, True, False]
    until(lambda: text(page, "#state").startswith("ready: broken has failed ("), what="the state")
    assert not page.find_element(By.ID, "model").is_displayed()
    assert views(page) == ["view-similarity"]
    page.find_element(By.ID, "dimensions").send_keys("7")
    choose(page, "org/rank")
    until(lambda: contents(page, "#rerank-list li"), what="a ranking")
    assert views(page) == ["view-rerank"]
    assert page.title == "embert · org/rank"
    assert "longest text 128 tokens" in text(page, "#facts").replace("\n", " ")
    script = "return performance.getEntriesByType('resource').map((each) => new URL(each.name).pathname)"
    assert "/models/org/rank/tokenize" in page.execute_script(script)
    query = page.find_element(By.ID, "rerank-query").get_attribute("value")
    documents = (page.find_element(By.ID, "rerank-documents").get_attribute("value") or "").split("\n")
    ranking = two.post("/models/org/rank/rerank", {"query": query, "texts": documents}).json()
    shown = [
        float(each.get_attribute("value") or "") for each in page.find_elements(By.CSS_SELECTOR, "#rerank-list data")
    ]
    assert shown == pytest.approx([each["score"] for each in ranking], abs=1e-6)
    page.back()
    until(lambda: views(page) == ["view-similarity"], what="the first model again")
    until(page.find_element(By.ID, "result").is_displayed, what="its matrix")
    assert page.find_element(By.ID, "dimensions").get_attribute("value") == ""  # of another width, perhaps
    assert page.title == "embert · dense"
    assert page.find_element(By.ID, "prompt").is_displayed()
    assert page.get_log("browser") == []  # type: ignore[no-untyped-call]


def test_the_keyboard_chooses_and_code_names_the_model(page: Chrome) -> None:
    page.find_element(By.ID, "chooser").send_keys("org")
    until(lambda: contents(page, "#rerank-list li"), what="a ranking")
    assert page.switch_to.active_element.get_attribute("id") == "chooser"
    page.find_element(By.ID, "tab-curl").click()
    curl = shlex.split(text(page, "#snippet").replace("\\\n", " "))
    assert '"model":"org/rank"' in curl[-1]
    assert '"relevance_score"' in subprocess.run(curl, capture_output=True, text=True, check=True).stdout
    page.find_element(By.ID, "chooser").send_keys(Keys.HOME)
    until(lambda: cells(page) and views(page) == ["view-similarity"], what="the first model")


def test_the_address_names_a_model_and_a_view(chrome: Chrome, two: Live) -> None:
    for address, title, view in (
        ("#model=org/rank", "org/rank", "view-rerank"),
        ("#model=org%2Frank&rerank", "org/rank", "view-rerank"),
        ("#model=org/rank&match", "org/rank", "view-rerank"),  # which it cannot
        ("#model=dense&rerank", "dense", "view-similarity"),
        ("#model=%E0%A4%A", "dense", "view-similarity"),
        ("#model=broken", "dense", "view-similarity"),
    ):
        open_page(chrome, f"{two.url}/{address}")
        until(lambda title=title: chrome.title == f"embert · {title}", what=address)  # type: ignore[misc]
        assert views(chrome) == [view]


def test_an_response_of_the_model_before_is_not_shown(page: Chrome) -> None:
    """It comes after the other one was chosen, and that one is asked then."""
    page.execute_script("""
        const real = window.fetch;
        window.fetch = async (path, options) => {
          const response = await real(path, options);
          if (String(path).endsWith("v1/embeddings")) await new Promise((resolve) => { window.release = resolve; });
          return response;
        };""")
    page.find_element(By.ID, "go").click()
    until(lambda: page.execute_script("return Boolean(window.release)"), what="the response that is kept back")
    choose(page, "org/rank")
    until(lambda: contents(page, "#rerank-list li"), what="a ranking")
    page.execute_script("window.release()")
    until(lambda: not page.find_elements(By.CSS_SELECTOR, "#view-similarity [aria-disabled]"), what="its end")
    assert not page.find_element(By.ID, "result").is_displayed()
    assert views(page) == ["view-rerank"]
    assert text(page, "#rerank-list data")
