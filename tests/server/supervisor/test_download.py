"""A start that downloads its model: responses to probes, Prometheus and clients meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

from tests.engine.test_hub import TOKEN, Hub
from tests.server.live import STAND_IN, Live, live, until
from tests.server.models import copy_model

MODEL = "org/private"
HALF = re.compile(r"downloading org/private, 4\d of 91 MB")
KEY = {"authorization": "Bearer of-the-test"}


@contextmanager
def slow_hub(folder: Path) -> Iterator[tuple[str, threading.Event]]:
    """Yields its address, and an event that lets the second half of the weights go."""
    hub, go_on = Hub(copy_model(folder)), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.respond(self.path, self.headers.get("authorization"))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                half = len(body) // 2 if self.path.endswith(".safetensors") else 0
                self.wfile.write(body[:half])
                assert not half or go_on.wait(120)
                self.wfile.write(body[half:])

        do_HEAD = do_GET  # noqa: N815 - http.server's name

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", go_on
        finally:
            go_on.set()
            server.shutdown()
            thread.join()


@contextmanager
def downloading(folder: Path, *options: str, status: int = 0) -> Iterator[tuple[Live, threading.Event]]:
    with slow_hub(folder / "model") as (address, go_on):
        env = {"HF_ENDPOINT": address, "HF_TOKEN": TOKEN, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "0"}
        env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "120"}
        with live(MODEL, *STAND_IN, *options, env=env, ready=False, status=status) as server:
            yield server, go_on


def test_routes_during_a_download(tmp_path: Path) -> None:
    with downloading(tmp_path, "--workers", "2", "--metrics-port", "0", "--api-key", "of-the-test") as (server, go_on):

        def half() -> bool:
            found = server.try_get("/readyz")
            return found is not None and HALF.fullmatch(found.json()["detail"]) is not None

        until(half, what="half of the weights")
        readiness = server.get("/readyz")
        assert (readiness.status_code, readiness.json()["models"]) == (503, {MODEL: "loading"})
        assert server.get("/livez").json()["status"] == "ok"
        assert server.get("/health").status_code == 503
        refused = server.post("/v1/embeddings", {"input": "a" * 100_000}, headers=KEY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert HALF.search(refused.json()["error"]["message"])
        assert server.get("/metrics").status_code == server.post("/embed", {"inputs": "a"}).status_code == 401
        scraped = server.get(f"{server.metrics_url}/metrics").text  # what Prometheus asks, of the port without keys
        assert server.get(f"{server.metrics_url}/readyz").status_code == 404
        assert server.get("/metrics", headers=KEY).status_code == 200
        for sent in (b"", b"\xff\xfe\r\n\r\n", b"GET /livez\r\n\r\n", b"x" * 100_000):  # not requests: dropped
            with socket.create_connection(("127.0.0.1", server.ports[0]), 60) as stranger:
                stranger.sendall(sent)
                stranger.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    assert stranger.recv(100) == b""
        for sample in (f'model_ready{{model="{MODEL}"}} 0.0', "starting 1.0", "draining 0.0"):
            assert f"embert_{sample}" in scraped
        assert "embert_engine_up{" not in scraped
        go_on.set()
        server.wait_ready()
        server.wait_announced()
        metrics = server.get("/metrics", headers=KEY).text
        for sample in (f'model_ready{{model="{MODEL}"}} 1.0', "starting 0.0", 'engine_up{engine="0"} 1.0'):
            assert f"embert_{sample}" in metrics
        assert server.post("/embed", {"inputs": "a"}, headers=KEY).status_code == 200


def test_a_download_can_be_ended(tmp_path: Path) -> None:
    with downloading(tmp_path) as (server, _):
        until(lambda: server.try_get("/livez"), what="a response")
        os.kill(psutil.Process(server.process.pid).threads()[-1].id, signal.SIGTERM)  # Linux gives it to this thread
        assert server.process.wait(60) == 0
