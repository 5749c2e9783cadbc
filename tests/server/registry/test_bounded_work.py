"""The work that one request may cause is bounded before it is done, and stops when the client leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from embert.server.registry.tokenizing import InputTexts
from tests.server.live import MAX_WEIGHTS, STAND_IN, Live, live
from tests.server.models import build_classifier, splade
from tests.server.stand_in import FAIL, SLEEP

MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def test_words_are_counted_in_the_beginning_only() -> None:
    cases: list[tuple[Any, int]] = [
        (["two words", "a" + " " * 100 + "b", [1] * 300], 260),
        (["a " * 5_000_000] * 2, 256),
        (["a" * 300_000, "b"], 1),
    ]
    for inputs, least in cases:
        assert InputTexts.of(inputs, "inputs").least_tokens(256) == least


# --- a server ---


@pytest.fixture(scope="module")
def admitting() -> Iterator[Live]:
    with live(*STAND_IN, "--max-queue-tokens", "2000000") as running:
        yield running


def send(server: Live, path: str, body: bytes, **headers: str) -> httpx.Response:
    with server.client(timeout=120.0) as client:
        return client.post(path, content=body, headers=headers)


def peak_growth_mb(server: Live, work: Callable[[], Any]) -> tuple[float, float]:
    """The growth of the HTTP process's memory in MB: at its peak, and what it keeps."""
    (pid,) = server.http_pids
    before = psutil.Process(pid).memory_info().rss
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts again
    work()
    status = Path(f"/proc/{pid}/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
    return (peak - before) / 1e6, (psutil.Process(pid).memory_info().rss - before) / 1e6


LARGEST = 9_990_000
NESTED = b",".join([b"[" * 150 + b"]" * 150] * (LARGEST // 301 - 1))
WORST: list[tuple[str, str, bytes, int, str]] = [
    ("dots", "/embed", b'{"inputs":"' + b"." * LARGEST + b'"}', 200, ""),
    ("ideographs", "/embed", b'{"inputs":"' + "日".encode() * (LARGEST // 3) + b'"}', 200, ""),
    ("from the left", "/embed", b'{"truncation_direction":"left","inputs":"' + b"." * LARGEST + b'"}', 200, ""),
    ("letters", "/embed", b'{"inputs":"' + "é".encode() * (LARGEST // 2) + b'"}', 413, "131072"),
    ("not to be cut", "/embed", b'{"truncate":false,"inputs":"' + b"." * LARGEST + b'"}', 422, "256"),
    ("2048 texts", "/embed", b'{"inputs":[' + b",".join([b'"' + b"." * 4800 + b'"'] * 2048) + b"]}", 200, ""),
    ("most lists of ids", "/embed",
     b'{"inputs":[' + b",".join([b"[" + b"5," * 254 + b"5]"] * 2048) + b"]}", 200, ""),
    ("too many ids", "/embed", b'{"inputs":[' + b"1," * 4_900_000 + b"1]}", 413, "values or more"),
    ("an unknown field", "/embed", b'{"inputs":"a","x":[' + b"{}," * 3_200_000 + b"1]}", 413, "lists and objects"),
    ("lists in lists", "/embed", b'{"inputs":[' + NESTED + b"]}", 413, "lists and objects"),
    ("lists in an instance", "/vertex", b'{"instances":[{"inputs":[' + NESTED + b"]}]}", 413, "lists and objects"),
    ("spaces", "/embed", b'{"inputs":[' + b" " * LARGEST + b'"a"]}', 200, ""),
    ("tokens", "/tokenize", b'{"inputs":"' + b"a " * (LARGEST // 2) + b'"}', 413, "131072"),
    ("ids back to text", "/decode", b'{"ids":[' + b"7," * 200_000 + b"7]}", 413, "200001"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "says"), [row[1:] for row in WORST], ids=[row[0] for row in WORST])
def test_the_worst_requests_take_little_memory(admitting: Live, path: str, body: bytes, status: int, says: str) -> None:
    responses: list[httpx.Response] = []
    peak, kept = peak_growth_mb(admitting, lambda: responses.append(send(admitting, path, body)))
    assert responses[0].status_code == status, responses[0].text[:300]
    assert says in responses[0].text
    assert peak < 400
    assert kept < 200


def test_requests_that_fail_leave_nothing_behind() -> None:
    """Without garbage collections, texts in a reference cycle would stay for ever."""
    text = b"a " * 1_000_000
    texts = b'","'.join([text[:40_000]] * 50)
    late = {408, 503}  # while its body is read, or afterwards
    failures: list[tuple[str, bytes, dict[str, str], set[int]]] = [
        ("/embed", b'{"inputs":"%b","truncate":3}' % text, {}, {422}),
        ("/embed", b'{"inputs":"%b"' % text, {}, {400}),
        ("/embed", b'{"inputs":[[%b],"%b"]}' % (b"101,%d" % FAIL, text), {}, {424}),
        ("/embed", b'{"inputs":["%b"]}' % texts, {"x-request-timeout": "0.001"}, late),
        ("/embed", b'{"inputs":[[%b],"%b"]}' % (b"101,%d" % (SLEEP + 3), text), {"x-request-timeout": "0.2"}, late),
        ("/embed", b'{"inputs":[%b"%b"]}' % (b"[[]]," * 100_000, text), {}, {413}),
        ("/tokenize", b'{"inputs":"%b"}' % text, {}, {413}),
        ("/vertex", b'{"instances":[{"inputs":"%b","truncate":3},{"inputs":3}]}' % text, {}, {422}),
    ]
    with live(*STAND_IN, code="import gc\ngc.disable()\n") as server, server.client(timeout=120.0) as client:

        def fail(times: int) -> None:
            for _ in range(times):
                for path, body, headers, statuses in failures:
                    response = client.post(path, content=body, headers=headers)
                    assert response.status_code in statuses, (body[:60], response.text)

        fail(2)
        _, kept = peak_growth_mb(server, lambda: fail(5))
        assert kept < 40  # of 80 MB that were sent


def test_weights_and_scores_of_a_response_are_bounded(tmp_path: Path) -> None:
    """An untrained SPLADE gives a text a weight for every second word of its vocabulary, 30522 words."""
    texts = [f"text {index}" for index in range(334)]
    labels = build_classifier(tmp_path / "labels", *(f"label {number}" for number in range(300)))
    many: dict[str, dict[str, Any]] = {
        "/models/sparse/embed_sparse": {"inputs": texts},
        "/models/sparse/v1/embeddings": {"input": texts, "embedding_types": ["sparse"]},
        "/models/sparse/vertex": {"instances": [{"inputs": text} for text in texts[:12]]},
        "/models/labels/predict": {"inputs": [[text] for text in texts]},
        "/models/labels/classify": {"input": texts},
        "/models/labels/vertex": {"instances": [{"inputs": text} for text in texts]},
    }
    models = (f"sparse={splade(tmp_path / 'sparse')}", f"labels={labels}")
    with live(*models, "--device", "cpu", constants={MAX_WEIGHTS: 100_000}) as running:
        assert len(running.post("/models/sparse/embed_sparse", {"inputs": texts[:3]}).json()) == 3
        assert len(running.post("/models/labels/classify", {"input": texts[:-1]}).json()["data"]) == 333

        def ask_for_many() -> None:
            for path, body in many.items():
                response = running.post(path, body)
                assert response.status_code == 413, response.text[:300]
                assert "100000" in response.text

        peak, _ = peak_growth_mb(running, ask_for_many)
        assert peak < 200
        # Of labels, /predict and /classify refuse before the work. The first request and the instances were queued.
        assert running.metrics()['embert_queue_duration_seconds_count{model="labels"}'] == 2


def test_tokenize_gives_the_same_in_parts(admitting: Live) -> None:
    sentence = "Naïve façade, [MASK] 日本 unbelievable. "
    single = admitting.post("/tokenize", {"inputs": sentence, "add_special_tokens": False}).json()[0]
    many = admitting.post("/tokenize", {"inputs": ["a", sentence * 3000]}).json()
    assert [token["text"] for token in many[0]] == ["[CLS]", "a", "[SEP]"]
    inside = many[1][1:-1]
    assert len(inside) == 3000 * len(single)
    for repeat in (0, 1, 777, 2999):
        shift = repeat * len(sentence)
        expected = [{**token, "start": token["start"] + shift, "stop": token["stop"] + shift} for token in single]
        assert inside[repeat * len(single) : (repeat + 1) * len(single)] == expected


# --- token ids of another tokenizer ---

# What LangChain's OpenAIEmbeddings posts for "Hello world": cl100k's ids, through the openai package.
LANGCHAIN = {"input": [[9906, 1917]], "model": MODEL, "encoding_format": "base64"}


@pytest.mark.parametrize("ids", [LANGCHAIN["input"], [9906, 1917]])
def test_token_ids_of_another_tokenizer_are_refused(admitting: Live, ids: Any) -> None:
    response = admitting.post("/v1/embeddings", {**LANGCHAIN, "input": ids})
    assert response.status_code == 422
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "input")
    for value in ("OpenAIEmbeddings(check_embedding_ctx_length=False)", "--openai-accepts token-ids"):
        assert value in error["message"]
    assert admitting.post("/v1/embeddings", {**LANGCHAIN, "input": ["Hello world"]}).status_code == 200
    assert admitting.post("/embed", {"inputs": ids}).status_code == 200  # TEI's routes take them
