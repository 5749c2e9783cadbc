"""litellm: a rerank endpoint in five dialects, embeddings in three, decisions in two."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

from embert.engine import Engine, Question
from tests.clients.conftest import Fleet, Page
from tests.clients.oracles import DOCUMENTS, QUERY, assert_embedded, assert_ranked

TEXTS = ["a cat", "a kitten"]


def pairs(response: Any) -> list[tuple[int, float]]:
    return [(result["index"], result["relevance_score"]) for result in response.results]


def test_the_page(page: Page, fleet: Fleet) -> None:
    found = page("litellm")
    assert_ranked(pairs(found["ranked"]), fleet.folder("reranker"), 2)
    for response in (found["embedded"], found["embedded_by_tei"]):
        assert_embedded([each["embedding"] for each in response.data], fleet.folder("minilm"), TEXTS)


# provider and what follows the address → additional arguments of the call
PROVIDERS: dict[tuple[str, str], dict[str, Any]] = {
    ("cohere", ""): {},
    ("cohere", "/v1/rerank"): {},
    ("cohere", "/v2/rerank"): {"max_tokens_per_doc": 256},
    ("hosted_vllm", ""): {},
    ("hosted_vllm", "/v1"): {},
    ("huggingface", ""): {},
    ("infinity", ""): {"return_documents": False},
    ("infinity", "/v1"): {"return_documents": False},
    ("jina_ai", ""): {},
}


@pytest.mark.parametrize(("provider", "path"), PROVIDERS)
def test_rerank(fleet: Fleet, provider: str, path: str) -> None:
    options = PROVIDERS[provider, path]
    response = litellm.rerank(
        model=f"{provider}/reranker",
        api_base=fleet.url("reranker") + path,
        api_key="none",
        query=QUERY,
        documents=DOCUMENTS,
        **options,
    )
    assert_ranked(pairs(response), fleet.folder("reranker"))
    if options.get("return_documents", True):
        texts = [result["document"]["text"] for result in response.results]
        assert texts == [DOCUMENTS[result["index"]] for result in response.results]


def test_infinity_reads_documents_as_strings(fleet: Fleet) -> None:
    """The page documents this limit of the client."""
    with pytest.raises(litellm.APIConnectionError):
        litellm.rerank(
            model="infinity/reranker", api_base=fleet.url("reranker"), query=QUERY, documents=DOCUMENTS, num_retries=0
        )


@pytest.mark.parametrize(("provider", "path"), [("hosted_vllm", "/v1"), ("ollama", "")])
def test_embeddings(fleet: Fleet, provider: str, path: str) -> None:
    response = litellm.embedding(model=f"{provider}/minilm", api_base=fleet.url("minilm") + path, input=TEXTS)
    assert_embedded([each["embedding"] for each in response.data], fleet.folder("minilm"), TEXTS)
    assert response.usage.prompt_tokens > 0


def test_similarities(fleet: Fleet) -> None:
    """`huggingface/sentence-transformers/…` compares the first text with the others."""
    response = litellm.embedding(
        model="huggingface/sentence-transformers/minilm",
        api_base=fleet.url("minilm"),
        input=["a cat", "a kitten", "a tax form"],
        input_type="sentence-similarity",
    )
    kitten, form = (each["embedding"] for each in response.data)
    assert 1 > kitten > form


def test_errors(fleet: Fleet) -> None:
    with pytest.raises(litellm.NotFoundError, match="no-such-model"):
        litellm.embedding(
            model="openai/no-such-model", api_base=fleet.url("minilm") + "/v1", api_key="none", input=TEXTS
        )


def test_decisions(page: Page, fleet: Fleet) -> None:
    state, choices = "The package arrived with a broken screen.", {"returns": "", "billing": "money"}
    with Engine.load(str(fleet.folder("nli")), device="cpu") as engine:
        damaged, topic = engine.decide(
            state,
            [
                Question.predicate("The customer reports a damaged item."),
                Question.choice("This is about", choices),
            ],
        )
    told = page("litellm")["decided"].answers
    assert told["damaged"].noul == damaged.probabilities[0]
    assert [*told["topic"].probabilities.values()] == [*topic.probabilities]
    options = [{"value": "returns"}, {"value": "billing", "description": "money"}]
    question = {"type": "choice", "name": "topic", "instructions": "This is about", "choices": options}
    for provider, path in (("openai", "/v1"), ("hosted_vllm", "")):
        response = litellm.decisions(
            model=f"{provider}/nli",
            api_base=fleet.url("nli") + path,
            api_key="none",
            input=state,
            questions=[question],
        )
        (answer,) = response.answers
        assert [each.probability for each in answer.probabilities] == [*topic.probabilities]
        assert answer.confidence == topic.confidence
