"""langchain: a compressor over a rerank endpoint, two kinds of embeddings, and decisions."""

from __future__ import annotations

import asyncio

import openai
import pytest
from langchain_openai import OpenAIEmbeddings

from embert.engine import Engine, Question
from tests.clients.conftest import Fleet, Page
from tests.clients.oracles import DOCUMENTS, assert_embedded, assert_ranked


def test_the_page(page: Page, fleet: Fleet) -> None:
    found = page("langchain")
    ranked = [(DOCUMENTS.index(each.page_content), each.metadata["relevance_score"]) for each in found["compressed"]]
    assert_ranked(ranked, fleet.folder("reranker"), 2)
    for embeddings in (found["by_tei"], found["by_openai"]):
        assert_embedded(embeddings.embed_documents(DOCUMENTS), fleet.folder("minilm"), DOCUMENTS)
        assert_embedded([asyncio.run(embeddings.aembed_query("a cat"))], fleet.folder("minilm"), ["a cat"])


def test_decisions(page: Page, fleet: Fleet) -> None:
    decided = page("langchain")["decided"]
    with Engine.load(str(fleet.folder("nli")), device="cpu") as engine:
        damaged, topic, damage = engine.decide(
            "The package arrived with a broken screen.",
            [
                Question.predicate("The customer reports a damaged item."),
                Question.choice("This is about", {"returns": "", "billing": "money"}),
                Question.score("The damage is", ["small", "large"]),
            ],
        )
    assert decided.predicates["damaged"].probability == damaged.probabilities[0]
    assert [*decided.choices["topic"].probabilities.items()] == [
        *zip(("returns", "billing"), topic.probabilities, strict=True)
    ]
    assert decided.choices["topic"].confidence == topic.confidence
    assert decided.scores["damage"].score == damage.score
    assert decided.scores["damage"].legend == {0: "small", 1: "large"}


def test_ids_of_another_tokenizer_are_refused(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenAI's vocabulary is a download, so a stand-in for it: the ids are wrong whatever they are."""

    class Tokenizer:
        def encode_ordinary(self, text: str) -> list[int]:
            return [1000 + ord(letter) for letter in text]

    embeddings = OpenAIEmbeddings(model="minilm", base_url=fleet.url("minilm") + "/v1", api_key="none")
    monkeypatch.setattr("tiktoken.encoding_for_model", lambda _: Tokenizer())
    monkeypatch.setattr("tiktoken.get_encoding", lambda _: Tokenizer())
    with pytest.raises(openai.APIStatusError, match="check_embedding_ctx_length"):
        embeddings.embed_query("a cat")
