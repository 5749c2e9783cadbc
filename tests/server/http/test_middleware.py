"""Keys, browsers, request ids, headers, logs and processes: what is around the routes."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import psutil
import pytest

from embert.server.config import ServeConfig
from embert.server.http.auth import Keys
from embert.server.http.errors import Unauthorized
from embert.server.request.request_context import LatencyBreakdown
from tests.server.live import STAND_IN, Live, Samples, live, until
from tests.server.stand_in import expected

CANARY = "canary-51bd"
KEY = {"authorization": "Bearer first key"}
ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Two HTTP processes with keys, one origin, JSON logs, and a port for metrics."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# for the tests\nfrom-file\n\n  indented-ünïcode  \n")
    options = ["--workers", "2", "--log-format", "json", "--log-level", "debug", "--served-model-name", "mini"]
    options += ["--api-key", "first key", "--api-key", "second", "--api-key-file", str(keys)]
    options += ["--cors-allow-origin", ORIGIN, "--metrics-port", "0"]
    with live(*STAND_IN, *options) as running:
        yield running


@pytest.fixture(scope="module")
def client(guarded: Live) -> Iterator[httpx.Client]:
    with guarded.client(headers=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def stranger(guarded: Live) -> Iterator[httpx.Client]:
    with guarded.client() as client:
        yield client


# --- keys ---


@pytest.mark.parametrize("key", ["first key", "second", "from-file", "indented-ünïcode"])
def test_every_key_opens(stranger: httpx.Client, key: str) -> None:
    headers = {b"authorization": f"Bearer {key}".encode()}
    assert stranger.post("/embed", json={"inputs": "a"}, headers=headers).status_code == 200
    assert stranger.get("/info", headers={b"authorization": f"bearer  {key}".encode()}).status_code == 200


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "missing"),
        ("", "missing"),
        ("Bearer", "wrong"),
        (f"Bearer {CANARY}", "wrong"),
        ("Bearer first", "wrong"),
        ("Bearer First Key", "wrong"),
        ("Basic second", "wrong"),
        ("second", "wrong"),
        ("Bearer # for the tests", "wrong"),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/embed"), ("POST", "/v1/embeddings"), ("GET", "/v1/models"), ("GET", "/info"), ("GET", "/metrics"),
     ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nothing"), ("POST", "/")],
)  # fmt: skip
def test_401(stranger: httpx.Client, method: str, path: str, given: str | None, said: str) -> None:
    answer = stranger.request(method, path, headers={} if given is None else {"authorization": given})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    body = answer.json()
    if path.startswith("/v1/"):
        error = body["error"]
        assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
        message = error["message"]
    else:
        assert body["error_type"] == "Unauthorized"
        message = body["error"]
    assert said in message
    assert "Authorization: Bearer" in message
    assert CANARY not in message


@pytest.mark.parametrize("path", ["/health", "/ping", "/livez", "/readyz"])
def test_probes_need_no_key(stranger: httpx.Client, path: str) -> None:
    assert stranger.get(path).status_code == 200


def test_openai_client_and_keys(guarded: Live) -> None:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="second", max_retries=0) as client:
        assert client.models.list().data[0].id == "mini"
        assert client.embeddings.create(model="mini", input="a").model == "mini"
        # The model's own id is good too, but the served name is what is answered.
        assert client.embeddings.create(model="sentence-transformers/all-MiniLM-L6-v2", input="a").model == "mini"
        assert client.models.retrieve("sentence-transformers/all-MiniLM-L6-v2").id == "mini"
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="third", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.embeddings.create(model="mini", input="a")
        assert refused.value.code == "invalid_api_key"


def test_no_keys_means_no_check() -> None:
    Keys(ServeConfig()).check({"path": "/embed", "headers": []})
    with pytest.raises(Unauthorized):
        Keys(ServeConfig(api_key=("k",))).check({"path": "/embed", "headers": []})


# --- browsers ---


def test_preflight_lets_a_key_through(stranger: httpx.Client) -> None:
    asked = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    answer = stranger.options("/v1/embeddings", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in answer.headers["access-control-allow-methods"]
    allowed = answer.headers["access-control-allow-headers"].lower()
    assert "authorization" in allowed
    assert "content-type" in allowed


def test_preflights_have_ids_and_are_counted(stranger: httpx.Client, client: httpx.Client) -> None:
    def counted() -> float:
        metrics = client.get("/metrics").text
        found = re.findall(r'embert_requests_total\{.*route="/similarity",status="200"\} (\S+)', metrics)
        return sum(map(float, found))

    before = counted()
    asked = {"origin": ORIGIN, "access-control-request-method": "POST", "x-request-id": "pre-1"}
    assert stranger.options("/similarity", headers=asked).headers["x-request-id"] == "pre-1"
    until(lambda: counted() == before + 1, what="the count of the preflight")
    plain = stranger.options("/similarity", headers={"origin": ORIGIN})  # no preflight: it wants a key like any other
    assert plain.status_code == 401


def test_answers_and_errors_name_the_origin(client: httpx.Client, stranger: httpx.Client) -> None:
    for answer in (
        client.post("/embed", json={"inputs": "a"}, headers={"origin": ORIGIN}),
        client.post("/embed", json={"inputs": ""}, headers={"origin": ORIGIN}),
        stranger.post("/embed", json={"inputs": "a"}, headers={"origin": ORIGIN}),
    ):
        assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_other_origins_are_not_let_in(client: httpx.Client, stranger: httpx.Client) -> None:
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in stranger.options("/embed", headers=asked).headers
    answer = client.post("/embed", json={"inputs": "a"}, headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/embed", "/v1/embeddings"])
def test_a_preflight_that_is_refused_is_an_error_like_others(stranger: httpx.Client, path: str) -> None:
    asked = {"origin": "https://evil.example", "access-control-request-method": "DELETE"}
    answer = stranger.options(path, headers=asked)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"
    assert "origin" in answer.headers["vary"].lower()
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    message = error["message"] if path == "/v1/embeddings" else error
    assert "(--cors-allow-origin)" in message
    assert "origin, method" in message


def test_no_origin_is_allowed_unless_asked_for(http: httpx.Client) -> None:
    answer = http.post("/embed", json={"inputs": "a"}, headers={"origin": ORIGIN})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers
    preflight = http.options("/embed", headers={"origin": ORIGIN, "access-control-request-method": "POST"})
    assert preflight.status_code == 405
    assert "access-control-allow-origin" not in preflight.headers


# --- request ids and the headers of an answer ---


@pytest.mark.parametrize("given", ["r-1", "8f0e1c1e-0000-4000-8000-000000000000", "x" * 128, "!\"#$%&'()*+,-./~"])
def test_request_id_is_echoed(http: httpx.Client, given: str) -> None:
    for answer in (
        http.post("/embed", json={"inputs": "a"}, headers={"x-request-id": given}),
        http.post("/embed", json={"inputs": ""}, headers={"x-request-id": given}),
        http.get("/livez", headers={"x-request-id": given}),
        http.get("/nothing", headers={"x-request-id": given}),
    ):
        assert answer.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize("given", [None, b"", b"x" * 129, b"two words", b"tab\there", "ünïcode".encode()])
def test_request_id_is_made(http: httpx.Client, given: bytes | None) -> None:
    headers = {} if given is None else {b"x-request-id": given}
    made = {http.get("/livez", headers=headers).headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in made)


TIMES = ("x-compute-time", "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time")


def test_compute_headers(http: httpx.Client) -> None:
    for path, body in (
        ("/embed", {"inputs": ["Hello, world", "ünïcode"]}),
        ("/v1/embeddings", {"input": ["Hello, world", "ünïcode"]}),
        ("/embed_all", {"inputs": ["Hello, world", "ünïcode"]}),
        ("/similarity", {"inputs": {"source_sentence": "Hello, world", "sentences": ["ünïcode"]}}),
    ):
        headers = http.post(path, json=body).headers
        assert headers["x-compute-type"] == "cpu"
        assert headers["x-compute-characters"] == "19"
        assert int(headers["x-compute-tokens"]) == 5 + 3
        milliseconds = {name: int(headers[name]) for name in TIMES}
        assert all(0 <= value < 30_000 for value in milliseconds.values())
        parts = dict(re.findall(r"(\w+);dur=(\d+\.\d{3})", headers["server-timing"]))
        assert list(parts) == ["tokenize", "queue", "inference", "total"]
        assert float(parts["total"]) >= float(parts["inference"]) > 0
        assert milliseconds["x-inference-time"] == int(float(parts["inference"]))
        assert milliseconds["x-total-time"] == int(float(parts["total"]))


@pytest.mark.parametrize("inference_s", [0.0119996, 0.0120004, 0.012, 0.0129994, 0.0129996])
def test_both_kinds_of_times_agree(inference_s: float) -> None:
    head = LatencyBreakdown(tokenize_s=0.0004, inference_s=inference_s).head(b"cpu")
    headers = dict(line.split(b": ", 1) for line in head.splitlines())
    found = re.search(rb"inference;dur=(\d+)\.\d{3}", headers[b"server-timing"])
    assert found is not None
    assert headers[b"x-inference-time"] == found[1]
    assert int(headers[b"x-compute-time"]) == round(0.4e3 + inference_s * 1e6) // 1000


def test_head_is_get_without_a_body(http: httpx.Client) -> None:
    for path in ("/health", "/readyz", "/livez", "/info", "/v1/models", "/metrics", "/docs"):
        head, get = http.head(path), http.get(path)
        assert head.status_code == get.status_code == 200
        assert head.content == b""
        assert head.headers["content-type"] == get.headers["content-type"]
    assert http.head("/embed").status_code == 405
    assert http.head("/nothing").status_code == 404
    assert http.get("/livez").status_code == 200  # the connection is still in order


@pytest.mark.parametrize("path", ["/embed/", "/v1/embeddings/", "/health/"])
def test_a_slash_at_the_end_is_another_path(http: httpx.Client, path: str) -> None:
    """No redirect: it would be built from the Host header, and many clients lose the body on it."""
    answer = http.request("GET" if path == "/health/" else "POST", path, json={"inputs": "a"})
    assert answer.status_code == 404
    assert f"; {path.rstrip('/')} is one" in answer.text


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("//v1/embeddings", "/v1/embeddings"),
        ("/v1//embeddings", "/v1/embeddings"),
        ("/v1/v1/embeddings", "/v1/embeddings"),
        ("/v1/v1/embeddings/", "/v1/embeddings"),
        ("/api/v1/embeddings", "/v1/embeddings"),
        ("/v1/predict", "/predict"),
        ("//embed", "/embed"),
        ("/v1/v1/rerank", "/v1/rerank"),
        ("/v1/chat/completions", "/docs"),
    ],
)
def test_a_path_with_too_much_in_it_is_named_with_the_one_that_was_meant(
    http: httpx.Client, path: str, meant: str
) -> None:
    answer = http.post(http.base_url.copy_with(raw_path=path.encode()), json={"inputs": "a"})
    assert answer.status_code == 404
    assert f"'{path}'; {meant} " in answer.text
    assert "a string of " in http.post("/v1/%0Aembeddings").text


def test_options_says_what_is_allowed(http: httpx.Client) -> None:
    answer = http.options("/embed")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"


def test_paths_do_not_become_labels(http: httpx.Client, server: Live) -> None:
    http.get(f"/{CANARY}")
    http.get(f"/v1/models/{CANARY}")
    http.request("BREW", "/embed")
    assert CANARY not in http.get("/metrics").text
    metrics = server.metrics()
    nothing = 'model="",priority=""'
    assert metrics[f'embert_requests_total{{{nothing},route="/v1/models/{{id}}",status="404"}}']
    assert metrics[f'embert_requests_total{{{nothing},route="other",status="404"}}']
    assert metrics[f'embert_requests_total{{{nothing},route="/embed",status="405"}}']


# --- two HTTP processes, one server ---


def test_two_processes_answer_and_metrics_are_theirs_together(guarded: Live) -> None:
    assert len(guarded.api_pids) == 2
    with httpx.Client() as plain:
        before = _counts(plain, guarded)
        for _ in range(40):  # a connection each, so that both processes get some
            with guarded.client(headers=KEY) as each:
                assert np.allclose(
                    each.post("/embed", json={"inputs": [101, 5, 102]}).json()[0], expected([101, 5, 102]), atol=1e-6
                )
        grown = {"embert_tokens_total": 120.0, 'embert_requests_total{route="/embed",status="200"}': 40.0}
        grown['embert_request_duration_seconds_count{route="/embed"}'] = 40

        def all_counted() -> bool:  # what the other process has seen is written a moment later
            after = _counts(plain, guarded)
            return all(after[name] == before.get(name, 0) + growth for name, growth in grown.items())

        until(all_counted, what="both processes' counts")


def test_connections_are_spread_over_the_processes(guarded: Live) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(guarded.client()).get("/livez")
        of_each = [len(psutil.Process(pid).net_connections("tcp")) for pid in guarded.api_pids]
        assert min(of_each) >= 10  # of 30, by chance; one socket for all of them once gave everything to one


def _counts(plain: httpx.Client, server: Live) -> Samples:
    """From --metrics-port, which needs no key."""
    answer = plain.get(f"{server.metrics_url}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    lines = (line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#"))
    return Samples((name, float(value)) for name, _, value in lines)


def test_the_metrics_port_has_metrics_only(guarded: Live, client: httpx.Client) -> None:
    assert guarded.ports[0] != guarded.ports[1]
    with httpx.Client(base_url=guarded.metrics_url) as plain:
        assert plain.get("/info").status_code == 404
        assert plain.post("/metrics").status_code == 404
        assert plain.get("/").status_code == 404
    assert client.get("/metrics").status_code == 200  # and it stays where it was


# --- logs ---


def test_the_log_is_json_and_holds_neither_text_nor_key(guarded: Live, client: httpx.Client) -> None:
    for body in (
        {"inputs": CANARY},
        {"inputs": [CANARY, 1]},
        {"inputs": CANARY, "prompt_name": CANARY},
        {CANARY: CANARY},
    ):
        client.post("/embed", json=body)
    client.post("/v1/embeddings", content=f'{{"input": "{CANARY}')
    client.get(f"/{CANARY}?key={CANARY}")
    client.get("/livez", headers={"authorization": f"Bearer {CANARY}", "x-request-id": CANARY})
    guarded.wait_announced()
    lines = [json.loads(line) for line in guarded.log.splitlines()]
    assert {"supervisor", "api-0", "api-1", "engine-0"} >= {line["process"] for line in lines} >= {"supervisor"}
    for line in lines:
        assert {"time", "level", "process", "pid", "message"} <= set(line)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert any(line["message"].startswith("ready") for line in lines)
    for secret in (CANARY, "first key", "from-file"):
        assert secret not in guarded.log


def test_start_log_of_text_format_says_what_runs(server: Live) -> None:
    log = server.log
    for piece in (
        "all-MiniLM-L6-v2",
        "bert",
        "mean",
        "384",
        "torch on cpu",
        "float32",
        "2048 tokens",
        server.url,
        "curl",
    ):
        assert piece in log


# --- TLS ---


def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        capture_output=True,
        check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("openssl cannot make a certificate here")
    trusting = ssl.create_default_context(cafile=certificate)
    options = ("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate), "--metrics-port", "0")
    with live(*STAND_IN, *options, ready=False) as server:
        with httpx.Client(base_url=server.url, verify=trusting) as client:

            def ready() -> bool:
                try:
                    return client.get("/readyz").status_code == 200
                except httpx.TransportError:
                    return False

            until(ready, what="readiness")
            assert client.post("/embed", json={"inputs": "a"}).status_code == 200
        for _ in range(3):  # TLS has no half-closed connections, but reads on too
            asks = urllib.request.Request(server.url + "/embed", bytes(30_000_000), method="POST")
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(asks, timeout=60, context=trusting)
            with refused.value:
                assert refused.value.code == 413
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{server.ports[0]}/livez")
        assert httpx.get(f"{server.metrics_url}/metrics").status_code == 200  # inside the cluster, plain
        server.wait_announced()
        assert "https://127.0.0.1" in server.log
