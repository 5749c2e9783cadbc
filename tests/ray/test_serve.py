"""Ray Serve: the routes, responses and errors of `embert serve`, and what happens where replicas end or are too few."""

from __future__ import annotations

import base64
import contextlib
import importlib
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest

from tests.ray.conftest import BUSY_S, LocalCluster
from tests.server.live import STAND_IN, TRUST, Live, free_port, live, until

pytest.importorskip("ray", reason="ray is an extra")

pytestmark = [
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20"),  # Ray's models
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # and what they import
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

FREQUENT_CHECKS = {"health_check_period_s": 0.5, "graceful_shutdown_wait_loop_s": 0.1}
ORIGIN = "https://example.org"
VARYING = {"date", "server", "x-request-id", "server-timing", "connection"}  # header fields of a single response


@pytest.fixture(scope="module")
def url(cluster: LocalCluster) -> Iterator[str]:
    """URL of Ray Serve's proxy."""
    from ray import serve

    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.serve._private.api.HTTP_PROXY_TIMEOUT", BUSY_S)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serving: Any = importlib.import_module("ray.serve")  # whose types are not whole
    serving.shutdown()


@pytest.fixture(scope="module")
def pair(url: str) -> str:
    """A stand-in on two replicas, below /pair."""
    from ray import serve

    from embert.ray import application

    made = application(
        {
            "encoder": STAND_IN[1],
            "openai_accepts": ("token-ids",),
            "cors_allow_origin": [ORIGIN],
            "serve_options": {"num_replicas": 2, "name": "pair", **FREQUENT_CHECKS},
        }
    )
    serve.run(made, name="pair", route_prefix="/pair")
    return f"{url}/pair"


@pytest.fixture(scope="module")
def alone() -> Iterator[Live]:
    """The same without Ray."""
    with live(*STAND_IN, "--openai-accepts", "token-ids", "--cors-allow-origin", ORIGIN) as running:
        yield running


def client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=120, verify=TRUST)


def servers(application: str) -> list[psutil.Process]:
    """The servers next to an application's replicas, each the child of one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if "embert.ray.server_process" in process.cmdline():
                parent = process.parent()
                if parent is not None and f"ServeReplica:{application}:" in " ".join(parent.cmdline()):
                    found.append(process)
    return found


# --- the same as embert serve ---

VECTORS = {"input": ["a cat", "a kitten"], "encoding_format": "base64"}
REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/embeddings", {"json": VECTORS}),
    ("POST", "/embed", {"json": {"inputs": ["a cat", "a kitten"]}}),
    ("POST", "/embed", {"json": {"inputs": [[101, 4937, 102]]}, "headers": {"accept": "application/octet-stream"}}),
    ("POST", "/embed", {"json": {"inputs": ["größer"]}, "headers": {"x-request-id": "mine"}}),
    ("POST", "/embed", {"json": {}}),
    ("POST", "/embed", {"content": b"no json"}),
    ("POST", "/embed", {"content": b"\x1f\x8b", "headers": {"content-encoding": "gzip"}}),
    ("POST", "/embed", {"json": {"inputs": ["a" * 10_000_000]}}),
    ("POST", "/rerank", {"json": {"query": "a", "texts": ["b"]}}),
    ("POST", "/v2/rerank", {"json": {"model": "m", "query": "a", "documents": ["b"]}}),
    ("POST", "/v1/embeddings", {"json": {"input": "a", "model": "another"}}),
    ("POST", "/tokenize", {"json": {"inputs": "a cat"}}),
    ("GET", "/embed", {}),
    ("GET", "/nope?a=b", {}),
    ("GET", "/v1/models/sentence-transformers%2Fall-MiniLM-L6-v2", {}),
    ("GET", "/health", {}),
    ("GET", "/readyz", {}),
    ("GET", "/info", {}),
    ("GET", "/", {"headers": {"accept": "text/html"}}),
    ("HEAD", "/info", {}),
    ("GET", "/openapi.json", {}),
]


def name(request: tuple[str, str, dict[str, Any]]) -> str:
    return f"{request[0]} {request[1]}"


@pytest.mark.parametrize("request_", REQUESTS, ids=name)
def test_an_answer_is_the_servers(pair: str, alone: Live, request_: tuple[str, str, dict[str, Any]]) -> None:
    method, path, options = request_
    with client(pair) as here, alone.client() as there:
        ours, wanted = here.request(method, path, **options), there.request(method, path, **options)
    assert ours.status_code == wanted.status_code
    assert shown(path, ours) == shown(path, wanted)
    if path == "/v2/rerank":
        assert ours.json()["message"] == wanted.json()["message"]
    elif method == "GET" and path in ("/v1/models/sentence-transformers%2Fall-MiniLM-L6-v2", "/health", "/info"):
        assert ours.json().keys() == wanted.json().keys()
    elif ours.status_code == 200 and path == "/embed" and ours.headers["content-type"] == "application/json":
        np.testing.assert_allclose(ours.json(), wanted.json(), atol=1e-6)
    elif ours.status_code == 200 and path in ("/embed", "/v1/embeddings"):
        np.testing.assert_allclose(floats(ours), floats(wanted), atol=1e-6)
    else:
        assert ours.content == wanted.content
    if "x-request-id" in options.get("headers", {}):
        assert ours.headers.get_list("x-request-id") == ["mine"]
    assert len(ours.headers.get_list("date")) == 1


def shown(path: str, response: httpx.Response) -> dict[str, str]:
    """Headers that do not vary; sizes and milliseconds by name only."""
    headers = {key: value for key, value in response.headers.items() if key not in VARYING}
    varies = "-time" in "".join(headers) or path in ("/health", "/info")
    return {
        key: "" if (key.startswith("x-") and key.endswith("-time")) or (key == "content-length" and varies) else value
        for key, value in headers.items()
    }


def floats(response: httpx.Response) -> Any:
    if response.headers["content-type"] == "application/octet-stream":
        return np.frombuffer(response.content, "<f4")
    return [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in response.json()["data"]]


# --- what ends ---


def under_load(url: str, happens: Callable[[], None]) -> list[int]:
    """Requests from several clients, before, while and after something happens: how many each made. All succeed."""
    done = [0] * 4
    end = threading.Event()

    def ask(number: int) -> None:
        # What was in flight on a replica that is killed gets a 500 from Ray, and the client asks again.
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=8) as asking:
            for text in itertools.count():
                if end.is_set():
                    return
                made = asking.embeddings.create(input=f"text {text}", model="sentence-transformers/all-MiniLM-L6-v2")
                assert len(made.data[0].embedding) == 384
                done[number] += 1

    with ThreadPoolExecutor(len(done)) as pool:
        asking = [pool.submit(ask, number) for number in range(len(done))]
        try:
            until(lambda: min(done) > 2 or any(each.done() for each in asking), 120, what="requests before it")
            happens()
            before = list(done)
            until(
                lambda: (
                    all(now > then + 2 for now, then in zip(done, before, strict=True))
                    or any(each.done() for each in asking)
                ),
                120,
                what="requests after it",
            )
        finally:
            end.set()
        for each in asking:
            each.result()
    return done


def test_a_server_is_killed_under_load(pair: str) -> None:
    """The health check tells Ray, which replaces the replica."""
    before = servers("pair")

    def happens() -> None:
        before[0].kill()
        until(lambda: len(alive := servers("pair")) == 2 and before[0] not in alive, 120, what="another replica")

    under_load(pair, happens)


def test_a_prefix_and_options(pair: str) -> None:
    with client(pair) as asking:
        assert asking.get("").status_code == 200
        response = asking.get("/info", headers={"origin": ORIGIN})
        assert response.json()["backend"] == "stand-in"
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "'/v1/nope'" in asking.post("/v1/nope", json={}).json()["error"]["message"]


# --- the page ---


def test_the_page_serves(url: str, cluster: LocalCluster, tmp_path: Path) -> None:
    from ray import serve

    from tests.ray import page

    page.run("serve.run", tmp_path)
    try:
        with client(url) as asking:
            response = asking.post("/v1/embeddings", json={"input": "a text"})
            assert len(response.json()["data"][0]["embedding"]) == 384
            assert asking.get("/info").json()["device"] == "cpu"
        (server,) = servers("default")
        assert server.environ()["OMP_NUM_THREADS"] == "1", "num_cpus is the number of the CPU encoder's threads"
    finally:
        serve.delete("default")


def test_the_page_has_a_config_file() -> None:
    import yaml
    from ray.serve.schema import ServeDeploySchema

    from tests.ray import page

    text = page.block("yaml", "applications")
    (found,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    module, _, name = found.import_path.partition(":")
    build = getattr(importlib.import_module(module), name)
    assert len(inspect.signature(build).parameters) == 1, "Ray hands it all arguments as one"
    build(found.args)


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 8080}, "`port` is not a replica's: Ray Serve's proxies listen"),
        ({"ssl_certfile": "cert.pem"}, "`ssl_certfile` is not a replica's"),
        ({"batch_size": 8}, "`batch_size` is not an option of `embert serve`"),
        ({"dtype": "int4"}, "--dtype must be one of auto"),
    ],
)
def test_options_that_do_not_do(options: dict[str, Any], message: str) -> None:
    from embert.ray import deployment
    from embert.server.config import ConfigError

    with pytest.raises(ConfigError, match=message):
        deployment(**options)
