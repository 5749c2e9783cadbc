"""Around the routes: keys, browsers, request ids, headers, paths of responses, and several HTTP processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.connections import EVEN
from tests.server.live import STAND_IN, Live, Samples, live, until

CANARY = "canary-51bd"
KEY = {"authorization": "Bearer second"}
ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# for the tests\nfrom-file\n\n  indented-ünïcode  \n")
    return file


@pytest.fixture(scope="module")
def two(key_file: Path) -> Iterator[Live]:
    """Two HTTP processes with keys, one origin, and a port for metrics."""
    options = ["--workers", "2", "--cors-allow-origin", ORIGIN, "--metrics-port", "0", "--served-model-name", "mini"]
    options += ["--api-key", "first key", "--api-key", "second", "--api-key-file", str(key_file), "--keyless", "docs"]
    with live(*STAND_IN, *options, "--log-level", "debug", constants=EVEN, ready=False) as running:
        running.wait_announced()  # both accept connections
        yield running


@pytest.fixture(scope="module")
def client(two: Live) -> Iterator[httpx.Client]:
    with two.client(headers=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def stranger(two: Live) -> Iterator[httpx.Client]:
    with two.client() as client:
        yield client


def metrics_of(server: Live) -> Samples:
    """From --metrics-port, which needs no key."""
    response = server.get(f"{server.metrics_url}/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return Samples.parse(response.text)


# --- keys ---


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/embed"), ("POST", "/v1/embeddings"), ("GET", "/v1/models"), ("GET", "/info"), ("GET", "/metrics"),
     ("GET", "/nothing"), ("POST", "/")],
)  # fmt: skip
def test_401(stranger: httpx.Client, method: str, path: str) -> None:
    response = stranger.request(method, path, headers={"authorization": f"Bearer {CANARY}"})
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    error = response.json()
    if path.startswith("/v1/"):
        assert error["error"].items() >= {"type": "authentication_error", "code": "invalid_api_key"}.items()
    else:
        assert error["error_type"] == "Unauthorized"
    assert "Authorization: Bearer" in response.text
    assert CANARY not in response.text


def test_a_running_server_reads_a_changed_key_file(two: Live, key_file: Path) -> None:
    def status(key: str) -> int:
        return two.post("/embed", {"inputs": "a"}, headers={"authorization": f"Bearer {key}"}).status_code

    assert (status("from-file"), status("new")) == (200, 401)
    key_file.write_text("new\n")
    until(lambda: all(status("new") == 200 for _ in range(6)), what="the new key, in both processes")
    until(lambda: all(status("from-file") == 401 for _ in range(6)), what="the end of the old key")
    for secret in (CANARY, "first key", "from-file"):
        assert secret not in two.log


# --- browsers ---


def test_a_preflight_is_served_counted_and_has_an_id(two: Live, stranger: httpx.Client) -> None:
    counted = 'embert_requests_total{route="/similarity",status="200"}'
    before = metrics_of(two)[counted]
    headers = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
        "x-request-id": "pre-1",
    }
    response = stranger.options("/similarity", headers=headers)
    assert (response.status_code, response.headers["x-request-id"]) == (200, "pre-1")
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in response.headers["access-control-allow-methods"]
    allowed = response.headers["access-control-allow-headers"].lower()
    assert "authorization" in allowed
    assert "content-type" in allowed
    until(lambda: metrics_of(two)[counted] == before + 1, what="the count of the preflight")
    plain = stranger.options("/similarity", headers={"origin": ORIGIN})  # no preflight: it needs a key like any other
    assert plain.status_code == 401


def test_responses_and_errors_name_the_origin(client: httpx.Client, stranger: httpx.Client) -> None:
    evil = "https://evil.example"
    for sender, text in ((client, "a"), (client, ""), (stranger, "a")):
        responses = [sender.post("/embed", json={"inputs": text}, headers={"origin": each}) for each in (ORIGIN, evil)]
        assert [each.headers.get("access-control-allow-origin") for each in responses] == [ORIGIN, None]


def test_a_preflight_of_another_origin_is_refused(stranger: httpx.Client) -> None:
    headers = {"origin": "https://evil.example", "access-control-request-method": "DELETE"}
    response = stranger.options("/embed", headers=headers)
    assert response.status_code == 400
    assert "access-control-allow-origin" not in response.headers
    assert "origin" in response.headers["vary"].lower()
    assert response.headers["x-request-id"]


def test_no_origin_is_allowed_by_default(http: httpx.Client) -> None:
    response = http.post("/embed", json={"inputs": "a"}, headers={"origin": ORIGIN})
    preflight = http.options("/embed", headers={"origin": ORIGIN, "access-control-request-method": "POST"})
    assert [response.status_code, preflight.status_code] == [200, 405]
    assert all("access-control-allow-origin" not in each.headers for each in (response, preflight))


# --- request ids and the headers of a response ---


@pytest.mark.parametrize("id_", ["r-1", "x" * 128, "!\"#$%&'()*+,-./~"])
def test_a_request_id_is_echoed(http: httpx.Client, id_: str) -> None:
    headers = {"x-request-id": id_}
    responses = [http.post("/embed", json={"inputs": text}, headers=headers) for text in ("a", "")]
    responses += [http.get(path, headers=headers) for path in ("/livez", "/nothing")]
    assert [response.headers.get_list("x-request-id") for response in responses] == [[id_]] * 4


@pytest.mark.parametrize("id_", [None, b"", b"x" * 129, b"two words", b"tab\there", "ünïcode".encode()])
def test_a_request_without_a_valid_id_gets_one(http: httpx.Client, id_: bytes | None) -> None:
    headers = {} if id_ is None else {b"x-request-id": id_}
    ids = {http.get("/livez", headers=headers).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)


TIMES = ("x-compute-time", "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": ["Hello, world", "ünïcode"]}),
        ("/v1/embeddings", {"input": ["Hello, world", "ünïcode"]}),
        ("/embed_all", {"inputs": ["Hello, world", "ünïcode"]}),
        ("/similarity", {"inputs": {"source_sentence": "Hello, world", "sentences": ["ünïcode"]}}),
    ],
)
def test_headers_of_work(http: httpx.Client, path: str, body: object) -> None:
    headers = http.post(path, json=body).headers
    assert headers["x-compute-type"] == "cpu"
    assert headers["x-compute-characters"] == "19"
    assert int(headers["x-compute-tokens"]) == 5 + 3
    milliseconds = {name: int(headers[name]) for name in TIMES}
    parts = dict(re.findall(r"(\w+);dur=(\d+\.\d{3})", headers["server-timing"]))
    assert list(parts) == ["tokenize", "queue", "inference", "total"]
    assert float(parts["total"]) >= float(parts["inference"]) > 0
    assert milliseconds["x-inference-time"] == int(float(parts["inference"]))
    assert milliseconds["x-total-time"] == int(float(parts["total"]))


def test_head_is_get_without_a_body(http: httpx.Client) -> None:
    for path in ("/health", "/readyz", "/livez", "/info", "/v1/models", "/metrics", "/docs"):
        head, get = http.head(path), http.get(path)
        assert head.status_code == get.status_code == 200
        assert head.content == b""
        assert head.headers["content-type"] == get.headers["content-type"]
    assert http.head("/embed").status_code == 405
    assert http.head("/nothing").status_code == 404
    assert http.get("/livez").status_code == 200  # the connection is still in order


# --- paths ---


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/embed/", "/embed"),  # no redirect: it would be built from the Host header, and clients lose the body on it
        ("/v1/embeddings/", "/v1/embeddings"),
        ("//v1/embeddings", "/v1/embeddings"),
        ("/v1//embeddings", "/v1/embeddings"),
        ("/v1/v1/embeddings", "/v1/embeddings"),
        ("/api/v1/embeddings", "/v1/embeddings"),
        ("/v1/predict", "/predict"),
        ("/v1/chat/completions", "/docs"),
    ],
)
def test_a_404_names_the_path_that_was_meant(http: httpx.Client, path: str, meant: str) -> None:
    response = http.post(http.base_url.copy_with(raw_path=path.encode()), json={"inputs": "a"})
    assert response.status_code == 404
    assert f"'{path}'; {meant} " in response.text
    assert "%0A" not in http.post("/v1/%0Aembeddings").text


def test_paths_do_not_become_labels(http: httpx.Client, server: Live) -> None:
    http.get(f"/{CANARY}")
    http.get(f"/v1/models/{CANARY}")
    http.put("/embed")
    assert CANARY not in http.get("/metrics").text
    metrics = server.metrics()
    nothing = 'model="",priority=""'
    assert metrics[f'embert_requests_total{{{nothing},route="/v1/models/{{id}}",status="404"}}']
    assert metrics[f'embert_requests_total{{{nothing},route="other",status="404"}}']
    assert metrics[f'embert_requests_total{{{nothing},route="/embed",status="405"}}']


# --- two HTTP processes, one server ---


def test_the_metrics_port_has_metrics_only(two: Live, client: httpx.Client) -> None:
    with httpx.Client(base_url=two.metrics_url, timeout=60) as plain:
        statuses = [plain.get("/info"), plain.post("/metrics"), plain.get("/")]
        assert [response.status_code for response in statuses] == [404] * 3
    assert client.get("/metrics").status_code == 200  # and it stays where it was
