"""The work that one request may cause is bounded before it is done, and stops when nobody wants it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from embert.server.config import ModelConfig
from embert.server.http.errors import PayloadTooLarge
from embert.server.request.inputs import InputTexts
from embert.server.request.model_handle import ModelHandle
from tests.server.live import STAND_IN, Live, live, until
from tests.server.models import splade

MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def test_words_are_counted_in_the_beginning_only() -> None:
    cases: list[tuple[Any, int]] = [
        (["two words", "a" + " " * 100 + "b", [1] * 300], 260),
        (["a " * 5_000_000] * 2, 256),
        (["a" * 300_000, "b"], 1),
    ]
    for given, least in cases:
        assert InputTexts.of(given, "inputs").least_tokens(256) == least


def test_tokens_have_a_limit_while_they_are_counted_too() -> None:
    model: Any = SimpleNamespace(
        model_id=MODEL,
        max_input_length=256,
        default_prompt_name=None,
        prompts={},
        width=384,
        config=SimpleNamespace(adapters=None),
    )
    anything: Any = SimpleNamespace(admissions=[None])
    handle = ModelHandle(ModelConfig(max_client_batch_tokens=5), model, anything, anything, anything, anything)
    handle.limits.check_tokens(5, "inputs")
    for more, number in ((True, "at least 6"), (False, "6")):
        said = rf"`inputs` has {number} tokens; the limit is 5 \(--max-client-batch-tokens\)"
        with pytest.raises(PayloadTooLarge, match=said):
            handle.limits.check_tokens(6, "inputs", more=more)


# --- a server ---


@pytest.fixture(scope="module")
def admitting() -> Iterator[Live]:
    with live(*STAND_IN, "--workers", "1", "--max-queue-tokens", "2000000") as running:
        yield running


def send(server: Live, path: str, body: bytes, **headers: str) -> httpx.Response:
    with server.client(timeout=120.0) as client:
        return client.post(path, content=body, headers=headers)


def peak_growth_mb(server: Live, work: Callable[[], Any]) -> tuple[float, float]:
    """The growth of the HTTP process's memory in MB: at its peak, and what it keeps."""
    (pid,) = server.api_pids
    before = psutil.Process(pid).memory_info().rss
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts anew
    work()
    status = Path(f"/proc/{pid}/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    return (peak - before) / 1e6, (psutil.Process(pid).memory_info().rss - before) / 1e6


LARGEST = 9_990_000
WORST: list[tuple[str, str, bytes, int, str]] = [
    ("dots", "/embed", b'{"inputs":"' + b"." * LARGEST + b'"}', 200, ""),
    ("one word", "/embed", b'{"inputs":"' + b"a" * LARGEST + b'"}', 200, ""),
    ("spaces", "/embed", b'{"inputs":"a' + b" " * LARGEST + b'"}', 200, ""),
    ("ideographs", "/embed", b'{"inputs":"' + "日".encode() * (LARGEST // 3) + b'"}', 200, ""),
    ("from the left", "/embed", b'{"truncation_direction":"left","inputs":"' + b"." * LARGEST + b'"}', 200, ""),
    ("letters", "/embed", b'{"inputs":"' + "é".encode() * (LARGEST // 2) + b'"}', 413, "--max-unbroken-characters"),
    ("not to be cut", "/embed", b'{"truncate":false,"inputs":"' + b"." * LARGEST + b'"}', 422, "more than "),
    ("similarity", "/similarity",
     b'{"inputs":{"source_sentence":"a","sentences":["' + b"." * LARGEST + b'"]}}', 200, ""),
    ("2048 texts", "/embed", b'{"inputs":[' + b",".join([b'"' + b"." * 4800 + b'"'] * 2048) + b"]}", 200, ""),
    ("most lists of ids", "/embed",
     b'{"inputs":[' + b",".join([b"[" + b"5," * 254 + b"5]"] * 2048) + b"]}", 200, ""),
    ("too many ids", "/embed", b'{"inputs":[' + b"1," * 4_900_000 + b"1]}", 413, "values or more; the limit is"),
    ("too many texts", "/embed", b'{"inputs":[' + b'"a",' * 2_400_000 + b'"a"]}', 413, "--max-client-batch-size"),
    ("a field nobody reads", "/embed", b'{"inputs":"a","x":[' + b"{}," * 3_200_000 + b"1]}", 413, "values or more"),
    ("tokens", "/tokenize", b'{"inputs":"' + b"a " * (LARGEST // 2) + b'"}', 413, "the limit is 131072 (--max-answer"),
    ("most tokens", "/tokenize", b'{"inputs":"' + b". " * 131_000 + b'"}', 200, ""),
    ("ids back to text", "/decode", b'{"ids":[' + b"7," * 200_000 + b"7]}", 413, "200001 tokens; the limit is 131072"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "says"), [row[1:] for row in WORST], ids=[row[0] for row in WORST])
def test_the_worst_requests_take_little_memory(admitting: Live, path: str, body: bytes, status: int, says: str) -> None:
    answers: list[httpx.Response] = []
    peak, kept = peak_growth_mb(admitting, lambda: answers.append(send(admitting, path, body)))
    assert answers[0].status_code == status, answers[0].text[:300]
    assert says in answers[0].text
    assert peak < 400
    assert kept < 200


def test_sparse_vectors_of_an_answer_are_bounded(tmp_path: Path) -> None:
    """An untrained SPLADE gives a text a weight for every second word of its vocabulary, 30522 words."""
    folder = str(splade(tmp_path))
    texts = [f"text {index}" for index in range(2048)]
    with live(folder, "--device", "cpu", "--max-answer-weights", "100000") as running:
        (vector,) = running.post("/embed_sparse", {"inputs": "a"}).json()
        assert 10_000 < len(vector) < 30_522
        many: dict[str, dict[str, Any]] = {
            "/embed_sparse": {"inputs": texts},
            "/": {"inputs": texts},
            "/v1/embeddings": {"input": texts, "embedding_types": ["sparse"]},
            "/vertex": {"instances": [{"inputs": text} for text in texts[:12]]},
        }
        for path, body in many.items():
            answers: list[httpx.Response] = []
            peak, _ = peak_growth_mb(running, lambda: answers.append(running.post(path, body)))  # noqa: B023
            assert answers[0].status_code == 413, answers[0].text[:300]
            said = r"the answer to `inputs?` has at least \d+ weights or scores; the limit is 100000 "
            assert re.search(said + r"\(--max-answer-weights\)", answers[0].text)
            assert peak < 200
        assert len(running.post("/embed_sparse", {"inputs": texts[:3]}).json()) == 3
        assert "ERROR" not in running.log


def test_short_texts_are_not_kept_waiting_by_long_ones(admitting: Live) -> None:
    """Both threads work on large requests, in turns; other texts are answered before these end."""
    large = b'{"inputs":[' + b",".join([b'"' + b". " * 2400 + b'"'] * 2000) + b"]}"
    with ThreadPoolExecutor(2) as pool, admitting.client(timeout=120.0) as client:
        began = admitting.metrics()["embert_request_texts_count"]
        waiting = [pool.submit(httpx.post, f"{admitting.url}/tokenize", content=large, timeout=120) for _ in range(2)]
        until(lambda: admitting.metrics()["embert_requests_in_flight"] >= 3, what="the large requests")
        middle = {"inputs": [f"ein Satz über Bücher und Züge {i} " * 6 for i in range(32)]}
        assert client.post("/embed", json=middle).status_code == 200
        assert admitting.metrics()["embert_request_texts_count"] == began + 1
        assert {future.result().status_code for future in waiting} == {413}


def test_a_deadline_stops_the_tokenizer(admitting: Live) -> None:
    body = b'{"inputs":[' + b",".join([b'"' + b"." * 4800 + b'"'] * 2048) + b"]}"
    before = admitting.metrics()["embert_request_texts_count"]
    answer = send(admitting, "/embed", body, **{"x-request-timeout": "0.2"})
    # Where the machine is slow, not even the body is there in time.
    assert answer.status_code in (408, 503)
    assert admitting.metrics()["embert_request_texts_count"] == before


def test_tokenize_gives_the_same_in_parts(admitting: Live) -> None:
    sentence = "Naïve façade, [MASK] 日本 unbelievable. "
    alone = admitting.post("/tokenize", {"inputs": sentence, "add_special_tokens": False}).json()[0]
    many = admitting.post("/tokenize", {"inputs": ["a", sentence * 3000]}).json()
    assert [token["text"] for token in many[0]] == ["[CLS]", "a", "[SEP]"]
    inside = many[1][1:-1]
    assert len(inside) == 3000 * len(alone)
    for repeat in (0, 1, 777, 2999):
        shift = repeat * len(sentence)
        expected = [{**token, "start": token["start"] + shift, "stop": token["stop"] + shift} for token in alone]
        assert inside[repeat * len(alone) : (repeat + 1) * len(alone)] == expected


# --- token ids of another tokenizer ---

# What LangChain's OpenAIEmbeddings posts for "Hello world": cl100k's ids, through the openai package.
LANGCHAIN = {"input": [[9906, 1917]], "model": MODEL, "encoding_format": "base64"}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
@pytest.mark.parametrize("ids", [LANGCHAIN["input"], [9906, 1917]])
def test_token_ids_of_another_tokenizer_are_refused(admitting: Live, path: str, ids: Any) -> None:
    answer = admitting.post(path, {**LANGCHAIN, "input": ids})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "input")
    assert "OpenAIEmbeddings(check_embedding_ctx_length=False)" in error["message"]
    assert "--accept-token-ids" in error["message"]


def test_the_same_client_may_send_text_and_teis_routes_take_ids(admitting: Live) -> None:
    assert admitting.post("/v1/embeddings", {**LANGCHAIN, "input": ["Hello world"]}).status_code == 200
    assert admitting.post("/embed", {"inputs": LANGCHAIN["input"]}).status_code == 200
    assert admitting.post("/v1/embeddings", {**LANGCHAIN, "input": []}).status_code == 400


def test_token_ids_are_taken_where_the_request_names_the_model(http: httpx.Client) -> None:
    for name in (MODEL,):
        assert http.post("/v1/embeddings", json={**LANGCHAIN, "model": name}).status_code == 200
    for unnamed in ({"input": [[101, 102]]}, {"input": [[101, 102]], "model": None}):
        answer = http.post("/v1/embeddings", json=unnamed)
        assert answer.status_code == 422
        assert "name the served model in `model`" in answer.json()["error"]["message"]
        assert "--accept-token-ids" not in answer.json()["error"]["message"]
    assert http.post("/v1/embeddings", json={**LANGCHAIN, "model": "text-embedding-3-small"}).status_code == 404
