"""Reranking and scoring by late interaction: MaxSim of the vectors that `/embed_all` returns."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from embert.engine import Model, Task, TaskOutput
from embert.engine.batch import cumulative
from embert.engine.heads.description import Heads, Layer, MultiVector, Role
from embert.engine.heads.late_interaction import NO_VECTORS
from embert.server.engine_worker.batches import Responder
from embert.server.engine_worker.lanes import Request
from embert.server.ipc.channel import EncodeRequest, PartialResult
from tests.server.live import Live
from tests.server.refusals import check_refused

QUERIES = ["a cat", "the dog, the", "who"]
# Over several batches of 64 tokens. The last is cut.
DOCUMENTS = [*("one cat and " + " ".join("abc"[: n % 4]) + " a" * n for n in range(9)), "the cat", "dog, " * 40]


def vectors(live: Live, text: str, role: str) -> Any:
    return np.array(live.post("/embed_all", {"inputs": text, "input_type": role}).json()[0], np.float32)


@pytest.fixture(scope="module")
def scores(late_interaction: Live) -> dict[tuple[str, str], float]:
    queries = {text: vectors(late_interaction, text, "query") for text in QUERIES}
    documents = {text: vectors(late_interaction, text, "document") for text in DOCUMENTS}
    pairs = itertools.product(queries.items(), documents.items())
    return {(one, other): float((query @ document.T).max(1).sum()) for (one, query), (other, document) in pairs}


@pytest.mark.parametrize(
    ("path", "rows", "name", "body"),
    [
        ("/rerank", "", "score", {"texts": DOCUMENTS}),
        ("/rerank", "results", "relevance_score", {"documents": DOCUMENTS}),
        ("/v1/rerank", "results", "relevance_score", {"documents": DOCUMENTS, "use_activation": True}),
        ("/v2/rerank", "results", "relevance_score", {"documents": DOCUMENTS}),
        ("/v1/ranking", "rankings", "logit", {"passages": [{"text": text} for text in DOCUMENTS]}),
    ],
)
def test_documents_by_their_scores(
    late_interaction: Live, scores: dict[tuple[str, str], float], path: str, rows: str, name: str, body: dict[str, Any]
) -> None:
    expected = np.array([scores[QUERIES[0], document] for document in DOCUMENTS])
    query = {"text": QUERIES[0]} if path == "/v1/ranking" else QUERIES[0]
    for top in (None, 3):
        response = late_interaction.post(path, {"query": query, **body, **({"top_n": top} if top else {})})
        found = response.json()[rows] if rows else response.json()
        assert [row["index"] for row in found] == np.argsort(-expected, kind="stable")[:top].tolist()
        np.testing.assert_allclose([row[name] for row in found], np.sort(expected)[::-1][:top], rtol=1e-5)
        assert response.headers["x-truncated-texts"] == "1"


def test_pair_by_pair(late_interaction: Live, scores: dict[tuple[str, str], float]) -> None:
    for queries in (QUERIES[:1], [QUERIES[n % 3] for n in range(len(DOCUMENTS))]):
        response = late_interaction.post("/score", {"queries": queries, "documents": DOCUMENTS}).json()
        expected = [
            scores[query, document] for query, document in zip(itertools.cycle(queries), DOCUMENTS, strict=False)
        ]
        np.testing.assert_allclose([row["score"] for row in response["data"]], expected, rtol=1e-5)
        alone = late_interaction.post("/score", {"queries": queries[0], "documents": DOCUMENTS[0]}).json()
        assert alone["data"][0] == response["data"][0]
        tokens = late_interaction.post("/score", {"queries": queries[:1] * 2, "documents": ["a", "a"]}).json()["usage"]
        assert tokens["prompt_tokens"] == 2 * (8 + 4)  # an expanded query, and [CLS] [unused1] a [SEP]


def test_limits_and_refusals(late_interaction: Live) -> None:
    body = {"query": "a", "texts": ["a", "b c"], "max_tokens_per_doc": 4, "max_tokens_per_query": 6}
    assert len(late_interaction.post("/rerank", body).json()) == 2
    low = {**body, "max_tokens_per_doc": 1}
    check_refused(late_interaction.post("/rerank", low), 422, ("max_tokens_per_doc", "at least 3", "1"))
    check_refused(late_interaction.post("/rerank", {"query": "a", "texts": []}), 400, ("texts", "empty"))
    check_refused(late_interaction.post("/predict", {"inputs": "a"}), 424, ("classify", "multi_vector, rerank"))


SKIPPED = 9
HEAD = MultiVector((Layer("linear", "", 4, 4, False, "identity"),), document=Role(skipped=(SKIPPED,)))
MODEL = cast("Model", SimpleNamespace(heads=Heads(multi_vector=HEAD)))


@pytest.mark.parametrize("seed", range(20))
def test_slices_in_any_order(seed: int) -> None:
    chance = random.Random(seed)
    is_query = [True, *(chance.random() < 0.3 for _ in range(15))]
    lengths = [chance.randint(1, 4) for _ in is_query]
    generator = np.random.default_rng(seed)
    texts = [generator.standard_normal((length, 4)).astype(np.float32) for length in lengths]
    ids = [np.full(length, 1, np.int32) for length in lengths]
    ids[-1][:] = SKIPPED
    message = EncodeRequest(
        7, Task.MULTI, np.concatenate(ids).tobytes(), np.array(lengths, np.int32).tobytes(), b"", 0, True, 60.0, 0.0,
        queries=np.array(is_query).tobytes(),
    )  # fmt: skip
    request = Request(7, lengths, channel="x", message=message)
    bounds = [0, *sorted(chance.sample(range(1, 16), 5)), 16]
    pieces = [request.piece(start, stop) for start, stop in itertools.pairwise(bounds)]
    chance.shuffle(pieces)
    sent: list[PartialResult] = []
    responder = Responder(lambda _, parts: sent.extend(parts), lambda _: None)
    for piece in pieces:
        own = texts[piece.start : piece.stop]
        rows = TaskOutput(np.concatenate(own), cumulative(np.array([len(one) for one in own])))
        responder.send_rows([piece], {Task.MULTI: rows}, 1.0, 2.0, 40, MODEL)
    found = np.zeros(16, np.float32)
    for part in sent:
        found[part.first_text : part.first_text + part.texts] = np.frombuffer(part.rows[0].values, np.float32)
    assert sorted((part.first_text, part.texts) for part in sent) == [
        (start, stop - start) for start, stop in itertools.pairwise(bounds)
    ]
    expected, query = [], texts[0]
    for text, asks in zip(texts, is_query, strict=True):
        query = text if asks else query
        expected.append(0.0 if asks else (query @ text.T).max(1).sum())
    expected[-1] = 0.0 if is_query[-1] else NO_VECTORS
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len(request.scores._queries) <= len(pieces)
    assert not request.scores._waiting
