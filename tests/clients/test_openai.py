"""openai: three kinds of vectors of one forward, and decisions."""

from __future__ import annotations

import httpx
import numpy as np
import openai
import pytest

from embert.engine import Engine, Question
from tests.clients.conftest import Fleet, Page
from tests.clients.oracles import assert_embedded


def test_the_page(page: Page, fleet: Fleet) -> None:
    found = page("openai")
    text = "Cats purr when they are content."
    assert_embedded([found["dense"]], fleet.folder("bge-m3"), [text])
    weights = found["weights"]
    with httpx.Client(base_url=fleet.url("bge-m3"), timeout=60) as client:
        (sparse,) = client.post("/embed_sparse", json={"inputs": text}).json()
        (ids,) = client.post("/tokenize", json={"inputs": text}).json()
    assert [(each["index"], each["value"]) for each in sparse] == list(
        zip(weights["indices"], weights["values"], strict=True)
    )
    tokens = np.array(found["tokens"])
    assert tokens.shape == (len(ids) - 1, 64)  # without the first token, as FlagEmbedding
    np.testing.assert_allclose(np.linalg.norm(tokens, axis=1), 1, atol=1e-5)


def test_decisions(page: Page, fleet: Fleet) -> None:
    damaged, topic, damage = page("openai")["decision"].answers
    with Engine.load(str(fleet.folder("nli")), device="cpu") as engine:
        expected = engine.decide(
            "The package arrived with a broken screen.",
            [
                Question.predicate("The customer reports a damaged item."),
                Question.choice("This is about", ["returns", "billing"]),
                Question.score("The damage is", ["small", "large"]),
            ],
        )
    assert (damaged.name, damaged.probability) == ("damaged", expected[0].probabilities[0])
    assert [each.probability for each in topic.probabilities] == [*expected[1].probabilities]
    assert (topic.choice, topic.confidence) == (["returns", "billing"][expected[1].index], expected[1].confidence)
    assert (damage.score, [each.label for each in damage.probabilities]) == (expected[2].score, ["small", "large"])


def test_embedder_does_not_decide(fleet: Fleet) -> None:
    client = openai.OpenAI(base_url=f"{fleet.url('minilm')}/v1", api_key="none", max_retries=0)
    question = {"type": "predicate", "instructions": "a"}
    with pytest.raises(openai.APIStatusError, match="decide") as refused:
        client.decisions.create(model="minilm", input="a", questions=[question])
    assert refused.value.status_code == 424
