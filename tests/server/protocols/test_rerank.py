"""The routes that rerank and score, on a cross-encoder: responses in each format, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.engine.test_decoders import instructed_models
from tests.server.live import STAND_IN, Live, live
from tests.server.models import NAN_WORD
from tests.server.protocols.oracle import logits_of, model_folder, sigmoid
from tests.server.refusals import check_refused

QUERY = "how do cats sleep?"
DOCUMENTS = [
    "A cat sleeps twelve hours or more a day.",
    "The interest rate was raised by the central bank.",
    "Kittens curl up.",
    "A dog’s life: naïve façades, 日本",  # noqa: RUF001  # a text like this has one
    "word " * 300,
    "Kittens curl up, do they?",
    "x",
]
TOLERANCE = 1e-5
V1, V2, TEI, SCORE = "/v1/rerank", "/v2/rerank", "/rerank", "/score"


@pytest.fixture(scope="module")
def client(reranker: Live) -> Iterator[httpx.Client]:
    with reranker.client() as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(reranker: Live) -> list[float]:
    """HuggingFace's logits of the documents."""
    logits: list[float] = logits_of(reranker, [(QUERY, document) for document in DOCUMENTS])[:, 0].tolist()
    return logits


def ranked(logits: list[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda index: -logits[index])


def close(found: list[float], wanted: Any) -> bool:
    return np.allclose(found, wanted, rtol=0, atol=TOLERANCE)


# --- responses ---


def test_tei(client: httpx.Client, expected: list[float]) -> None:
    order = ranked(expected)
    response = client.post(TEI, json={"query": QUERY, "texts": DOCUMENTS})
    rows = response.json()
    assert [row["index"] for row in rows] == order
    assert all(row.keys() == {"index", "score"} for row in rows)
    assert close([row["score"] for row in rows], sigmoid(np.array(expected)[order]))
    assert response.headers["x-truncated-texts"] == "1"
    assert int(response.headers["x-compute-characters"]) == sum(len(QUERY) + len(each) for each in DOCUMENTS)
    body = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True, "return_text": True, "top_n": 3}
    raw = client.post(TEI, json=body).json()
    assert close([row["score"] for row in raw], np.array(expected)[order[:3]])
    assert [row["text"] for row in raw] == [DOCUMENTS[index] for index in order[:3]]


@pytest.mark.parametrize(("query", "texts"), [("cat", ["", "the cat", ""]), ("", ["a", ""])])
def test_empty_texts_are_scored(client: httpx.Client, reranker: Live, query: str, texts: list[str]) -> None:
    logits = logits_of(reranker, [(query, text) for text in texts])[:, 0]
    for path, field, key in ((TEI, "texts", "score"), (V1, "documents", "relevance_score")):
        response = client.post(path, json={"query": query, field: texts, "raw_scores": True}).json()
        rows = response if path == TEI else response["results"]
        assert close([row[key] for row in sorted(rows, key=lambda row: row["index"])], logits)


def test_equal_texts_come_in_the_order_of_the_request(client: httpx.Client) -> None:
    rows = client.post(TEI, json={"query": QUERY, "texts": [*["same"] * 20, "other"], "raw_scores": True}).json()
    same = [(-row["score"], row["index"]) for row in rows if row["index"] != 20]
    # The CPU encoder does not promise the last bit, but equal scores are in the order of the request.
    assert same == sorted(same)
    assert same[0][0] == pytest.approx(same[-1][0], abs=TOLERANCE)


@pytest.mark.parametrize("path", [V1, TEI])
def test_documents_and_options_of_several_apis(client: httpx.Client, expected: list[float], path: str) -> None:
    order = ranked(expected)
    documents = [{"text": text, "title": "ignored"} if index % 2 else text for index, text in enumerate(DOCUMENTS)]
    body = {"model": "reranker", "query": QUERY, "documents": documents, "return_documents": True, "top_n": 4}
    response = client.post(path, json=body)
    content = response.json()
    assert list(content) == ["id", "object", "model", "results", "data", "usage", "meta"]
    assert (content["object"], content["model"]) == ("rerank", "reranker")
    assert [result["index"] for result in content["results"]] == order[:4]
    assert [result["document"] for result in content["results"]] == [{"text": DOCUMENTS[index]} for index in order[:4]]
    assert close([result["relevance_score"] for result in content["results"]], sigmoid(np.array(expected)[order[:4]]))
    tokens = int(response.headers["x-compute-tokens"])
    assert content["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert content["meta"] == {
        "api_version": {"version": "1"},
        "tokens": {"input_tokens": tokens, "output_tokens": 0},
    }
    for options, values in (({"top_n": 0}, sigmoid(np.array(expected)[order])), ({"top_n": 50}, None),
                            ({"raw_scores": True}, np.array(expected)[order]),
                            ({"use_activation": False}, np.array(expected)[order])):  # fmt: skip
        results = client.post(path, json={"query": QUERY, "documents": documents} | options).json()["results"]
        assert [result["index"] for result in results] == order
        assert all("document" not in result for result in results)
        assert values is None or close([result["relevance_score"] for result in results], values)


@pytest.mark.parametrize("fields", [{}, {"top_k": 2}, {"truncation": True}, {"return_documents": True}])
def test_voyage(client: httpx.Client, fields: dict[str, Any]) -> None:
    """Its clients read `data`, whose documents are strings, and one of them `object`."""
    content = client.post(V1, json={"model": "reranker", "query": QUERY, "documents": DOCUMENTS, **fields}).json()
    assert content["object"] == "list"
    for row, result in zip(content["data"], content["results"], strict=True):
        assert (row["index"], row["relevance_score"]) == (result["index"], result["relevance_score"])
        document = DOCUMENTS[row["index"]] if "return_documents" in fields else None
        assert (row.get("document"), result.get("document")) == (document, document and {"text": document})


@pytest.mark.parametrize("fields", [{"top_n": 2}, {"raw_scores": False, "return_documents": False}])
def test_infinitys_client_takes_no_other_object(client: httpx.Client, fields: dict[str, Any]) -> None:
    assert client.post(V1, json={"query": QUERY, "documents": DOCUMENTS, **fields}).json()["object"] == "rerank"


def test_cohere(client: httpx.Client, expected: list[float]) -> None:
    order = ranked(expected)
    response = client.post(V2, json={"model": "reranker", "query": QUERY, "documents": DOCUMENTS, "priority": 7})
    content = response.json()
    assert list(content) == ["id", "results", "meta"]
    assert [result["index"] for result in content["results"]] == order
    assert close([result["relevance_score"] for result in content["results"]], sigmoid(np.array(expected)[order]))
    assert content["meta"] == {
        "api_version": {"version": "2"},
        "tokens": {"input_tokens": int(response.headers["x-compute-tokens"]), "output_tokens": 0},
    }
    best = {"query": QUERY, "documents": DOCUMENTS, "relevant_spans": {"mode": "disabled"}, "top_n": 1}
    assert client.post(V2, json=best).json()["results"] == content["results"][:1]


@pytest.mark.parametrize(
    ("path", "first", "second"),
    [(SCORE, "queries", "documents"), ("/v1/score", "queries", "items"), (SCORE, "text_1", "text_2"),
     (SCORE, "data_1", "data_2")],
)  # fmt: skip
def test_vllms_scores(client: httpx.Client, expected: list[float], path: str, first: str, second: str) -> None:
    response = client.post(path, json={"model": "reranker", first: QUERY, second: DOCUMENTS})
    content = response.json()
    assert list(content) == ["id", "object", "created", "model", "data", "usage"]
    assert [(each["index"], each["object"]) for each in content["data"]] == [(index, "score") for index in range(7)]
    assert close([each["score"] for each in content["data"]], sigmoid(np.array(expected)))
    tokens = int(response.headers["x-compute-tokens"])
    assert content["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    raw = client.post(path, json={first: [QUERY], second: DOCUMENTS, "use_activation": False}).json()["data"]
    assert close([each["score"] for each in raw], expected)


def test_pair_by_pair(client: httpx.Client, reranker: Live) -> None:
    firsts = DOCUMENTS[::-1]
    response = client.post(SCORE, json={"text_1": firsts[1:], "text_2": DOCUMENTS[1:], "use_activation": False}).json()
    # The long document meets itself: both are cut.
    logits = logits_of(reranker, [*zip(firsts[1:], DOCUMENTS[1:], strict=True)])
    assert close([each["score"] for each in response["data"]], logits[:, 0])


# --- what is cut ---


@pytest.mark.parametrize("direction", ["Right", "left"])
def test_the_longer_text_is_cut(client: httpx.Client, reranker: Live, direction: str) -> None:
    document = " ".join(f"word{i} {i}" for i in range(200))
    body = {"query": QUERY, "texts": [document, "short"], "truncation_direction": direction, "raw_scores": True}
    response = client.post(TEI, json=body)
    assert response.headers["x-truncated-texts"] == "1"
    assert response.headers["x-compute-tokens"] == str(128 + 5 + 1 + 3)
    (score,) = [row["score"] for row in response.json() if row["index"] == 0]
    assert close([score], logits_of(reranker, [(QUERY, document)], side=direction.lower())[0])
    check_refused(client.post(TEI, json=body | {"truncate": False}), 422, ["`texts`: pair 0 has "])
    body = {"query": QUERY, "documents": [document], "raw_scores": True, "truncation_side": direction.lower()}
    assert close([client.post(V1, json=body).json()["results"][0]["relevance_score"]], [score])


def test_limits_of_tokens(client: httpx.Client, reranker: Live) -> None:
    def score(**fields: Any) -> float:
        body = {"query": QUERY, "documents": [DOCUMENTS[0]], "use_activation": False}
        result: dict[str, float] = client.post(V1, json=body | fields).json()["results"][0]
        return result["relevance_score"]

    shorter = DOCUMENTS[0].split()
    (ten,) = logits_of(reranker, [(QUERY, " ".join(shorter[:4]))])[0]
    assert close([score(max_tokens_per_doc=4)], [ten])
    # The query has five tokens, and there are three more; with fewer left, both texts are cut.
    six, four = logits_of(reranker, [(QUERY, " ".join(shorter[:6])), (QUERY.rstrip("?"), " ".join(shorter[:4]))])
    assert close([score(truncate_prompt_tokens=5 + 3 + 6)], six)
    assert close([score(truncate_prompt_tokens=4 + 3 + 4)], four)
    whole = score()
    for nothing in ({"max_tokens_per_doc": 0}, {"max_tokens_per_doc": 500}, {"truncate_prompt_tokens": 5000}):
        assert score(**nothing) == whole
    assert close([score(max_tokens_per_query=1)], logits_of(reranker, [("how", DOCUMENTS[0])])[0])
    cut = client.post(V2, json={"query": QUERY, "documents": [DOCUMENTS[0]], "max_tokens_per_doc": 4})
    assert close([cut.json()["results"][0]["relevance_score"]], [sigmoid(ten)])
    assert cut.headers["x-truncated-texts"] == "1"


# --- what is refused ---

LONG = {"query": "q", "documents": ["d"] * 10_001}
D: dict[str, Any] = {"query": "q", "documents": ["a"]}
# path, body, status, what the message holds
REFUSED: list[tuple[str, dict[str, Any], int, tuple[str, ...]]] = [
    (TEI, {"query": "q", "texts": []}, 400, ("`texts`",)),
    (TEI, {"query": "q"}, 422, ("`texts`", "`documents`")),
    (TEI, {"query": ["q"], "texts": ["a"]}, 422, ("`query`", "a list of 1")),
    (TEI, {"query": "q", "texts": ["a", 5]}, 422, ("`texts[1]` is 5",)),
    (TEI, {"query": "q", "texts": LONG["documents"]}, 413, ("`texts`", "10001", "10000", "--max-client-documents")),
    (V1, {"query": "q"}, 422, ("`documents`",)),
    (V1, {"query": "q", "documents": []}, 400, ("`documents`",)),
    (V1, {"query": "q", "documents": ["a", {"txt": "a"}]}, 422, ("`text`", "`documents[1]` is an object")),
    (V1, {"query": "q", "documents": [{"text": 5}]}, 422, ("`documents[0]",)),
    (V1, D | {"top_n": -3}, 422, ("`top_n`", "-3")),
    (V1, D | {"instruction": "i"}, 422, ("`instruction`",)),
    (V1, D | {"truncate_prompt_tokens": 4}, 422, ("`documents`", "5", "4")),
    (V1, D | {"model": "rerank-v3.5"}, 404, ("`model`", "reranker", "'rerank-v3.5'")),
    (V1, LONG, 413, ("`documents`", "10001", "10000")),
    (V2, {"query": "q", "documents": [{"text": "a"}]}, 422, ("`documents[0]`",)),
    (V2, D | {"top_n": 0}, 422, ("`top_n`", "1")),
    (V2, D | {"max_tokens_per_doc": 0}, 422, ("`max_tokens_per_doc`",)),
    (SCORE, {}, 422, ("`text_1` and `text_2`", "`data_1` and `data_2`")),
    (SCORE, {"queries": "q", "text_2": "a"}, 422, ("`queries`, `text_2`",)),
    (SCORE, {"queries": "q", "documents": "a", "items": "b"}, 422, ("`documents`, `items`, `queries`",)),
    (SCORE, {"queries": ["q", "r"], "documents": "a"}, 422, ("`queries` has 2", "`documents` has 1")),
    (SCORE, {"queries": [], "documents": "a"}, 400, ("`queries`",)),
    (SCORE, {"text_1": [["q"]], "text_2": "a"}, 422, ("`text_1[0]`",)),
    (SCORE, {"data_1": ["q"] * 10_001, "data_2": ["d"] * 10_001}, 413, ("`data_1`", "10001")),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), REFUSED, ids=lambda each: str(each)[:50])
def test_refused(client: httpx.Client, path: str, body: dict[str, Any], status: int, says: tuple[str, ...]) -> None:
    check_refused(client.post(path, json=body), status, says)


@pytest.mark.parametrize("path", [TEI, V1, V2, SCORE, "/v1/score", "/predict", "/classify"])
def test_a_model_without_the_task(http: httpx.Client, classifier: Live, path: str) -> None:
    body = {"query": "q", "documents": ["a"]}
    task, status = (
        "classify" if path in ("/predict", "/classify") else "rerank",
        424 if path in (TEI, "/predict") else 400,
    )
    check_refused(http.post(path, json=body), status, ("all-MiniLM-L6-v2", task, "embed, tokens"))
    if task == "rerank":
        check_refused(classifier.post(path, body), status, ("classifier", "rerank", "3"))  # which has three labels


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings", "/embed_all", "/similarity"])
def test_a_cross_encoder_does_not_embed(client: httpx.Client, path: str) -> None:
    inputs: Any = {"source_sentence": "a", "sentences": ["b"]} if path == "/similarity" else "a"
    response = client.post(path, json={"inputs": inputs, "input": "a"})
    check_refused(response, 400 if path == "/v1/embeddings" else 424, ["classify, rerank"])


@pytest.mark.parametrize("path", [TEI, V1, V2, SCORE])
def test_scores_that_are_not_finite_are_an_error_and_never_null(client: httpx.Client, path: str) -> None:
    texts = "texts" if path == TEI else "documents"
    response = client.post(path, json={"query": "q", "queries": "q", texts: ["fine", f"{NAN_WORD} is not"]})
    check_refused(response, 424, ["not finite"])
    assert client.post(path, json={"query": "q", "queries": "q", texts: ["fine"]}).status_code == 200


# --- large requests ---


@pytest.fixture(scope="module")
def small(reranker: Live) -> Iterator[Live]:
    """A stand-in, whose inference costs nothing."""
    options = ("--payload-limit", "1000000", "--max-queue-tokens", "100000000")
    with live(model_folder(reranker), *STAND_IN, *options, env={"STAND_IN_ORDERS": "no"}) as running:
        yield running


def test_as_many_documents_as_are_allowed(small: Live) -> None:
    for documents in (["d e"] * 10_000, [{"text": "d", "title": "t", "url": "u"} for _ in range(10_000)]):
        response = small.post(V1, {"query": "q", "documents": documents, "return_documents": True})
        assert response.status_code == 200
        results = response.json()["results"]
        assert sorted(result["index"] for result in results) == [*range(10_000)]
        assert all(result["document"] == {"text": "d e" if documents[0] == "d e" else "d"} for result in results)
    firsts = {"text_1": ["q"] * 10_000, "text_2": ["d"] * 10_000}
    assert len(small.post(SCORE, firsts).json()["data"]) == 10_000


def test_a_query_of_many_tokens_and_few_characters(small: Live) -> None:
    """Its tokens count in every pair."""
    response = small.post(V2, {"query": "word " * 120, "documents": ["d"] * 9000})
    check_refused(response, 413, ("`documents`", "1116000", "1000000", "--payload-limit"))


def test_a_large_body_of_many_strings(small: Live) -> None:
    documents = [{f"field {i}": "a" for i in range(12)} for _ in range(9000)]
    check_refused(small.post(V1, {"query": "q", "documents": documents}), 413, ["--payload-limit"])
    short = b'{"query":"q","documents":[' + b'"",' * 300_000 + b'""]}'
    with small.client() as opened:
        check_refused(opened.post(V1, content=short), 413, ("164096", "10000", "--max-client-documents"))


# --- instructions ---


@pytest.fixture(scope="module")
def instructed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A published reranker, and an embedder whose prompt of queries has an instruction."""
    folders = instructed_models(tmp_path_factory.mktemp("models"))
    with live(*(f"{folder.name}={folder}" for folder in folders), "--device", "cpu") as running:
        yield running


def test_instructions(instructed: Live) -> None:
    with instructed.client() as client:

        def scores(path: str, **more: Any) -> list[float]:
            response = client.post(path, json={"model": "ranks", "query": "cat", "documents": ["a", "b c"], **more})
            assert response.status_code == 200, response.text
            return [row["relevance_score"] for row in response.json()["results"]]

        usual = "Given a web search query, retrieve relevant passages that answer the query"
        for path in (V1, V2, TEI):
            assert scores(path) == scores(path, instruction=usual) != scores(path, instruction="Find code.")
        assert scores(V1, instruction="Find code.") == scores(V2, instruction="Find code.")
        long = {"model": "ranks", "query": "cat", "documents": ["a", "b"], "instruction": "many words " * 2000}
        check_refused(client.post(V1, json=long), 422, ("`instruction` has 22000 characters", "limit is "))

        def embed(**more: Any) -> Any:
            response = client.post("/v1/embeddings", json={"model": "embeds", **more})
            assert response.status_code == 200, response.text
            return [item["embedding"] for item in response.json()["data"]]

        asked = embed(input=["cat", "dog"], instruction="Find code.")
        assert asked == embed(input=["Instruct: Find code.\nQuery:cat", "Instruct: Find code.\nQuery:dog"])
        assert embed(input="cat", input_type="query", instruction="Find it.") == embed(input="cat", prompt_name="query")
        for more, words in (
            ({"instruction": "many words " * 2000}, ("`instruction` has 22000 characters", "512 tokens")),
            ({"instruction": "a", "prompt_name": "query"}, ("`instruction` cannot be used with `prompt_name`",)),
            ({"instruction": "a", "input_type": "document"}, ("`instruction` is for queries",)),
        ):
            response = client.post("/v1/embeddings", json={"model": "embeds", "input": "cat", **more})
            check_refused(response, 422, words)
