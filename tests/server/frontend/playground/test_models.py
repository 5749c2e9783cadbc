"""The page of a server of several models: one is chosen, and asked by its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
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
