"""Refusals are the same whether a body comes with its head, which the protocol serves, or later, over ASGI."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import prometheus_client.values
import pytest

from embert.engine.errors import InputError
from embert.server.config import ServeConfig
from embert.server.frontend.routes import error_formats_by_path, labels_by_path
from embert.server.frontend.serve import RequestObserver, RequestServer, TaskEndpoint
from embert.server.http import errors
from embert.server.http.auth import Keys
from embert.server.http.held_bytes import BodyReader, HeldBytes
from embert.server.observability.http_metrics import HttpMetrics
from embert.server.observability.metrics import REJECT_REASONS
from embert.server.protocols.request_context import RequestContext
from tests.server.http.echo_server import Clock, Response, serving

KEY = b"authorization: Bearer right"
PATHS = ("/embed", "/v1/embeddings", "/v2/embed", "/api/embed", "/v1/systemone")  # one for each form of errors
PROBE = "/readyz"
# The error that a handler raises, status (on other routes than TEI's), and the reason that counts it.
RAISED: list[tuple[Exception, int, str | None]] = [
    (errors.BadRequest("the request body is not valid JSON"), 400, None),
    (errors.EmptyInput("is empty", "inputs"), 400, None),
    (errors.ModelUnknown("must be a", "model", value="'b'"), 404, None),
    (errors.PayloadTooLarge("has 3 texts", "inputs", limit=2), 413, "too_large"),
    (errors.RequestError("`Content-Encoding` must be `identity`", status=415), 415, None),
    (errors.Invalid("must be a string", "inputs", value="5"), 422, None),
    (InputError("text 0 has 300 tokens; the limit is 256", param="inputs"), 422, None),
    (errors.InferenceFailed("not finite"), 424, None),
    (errors.TaskMissing("a does not have the task rerank"), 400, None),
    (errors.Overloaded("the queue is full", retry_after_s=2), 429, "queue_full"),
    *(
        (errors.Unavailable(reason, retry_after_s=1, reject_reason=reason), 503, reason)
        for reason in ("loading", "draining", "deadline", "memory")
    ),
    (RuntimeError("a bug"), 500, None),
]


@pytest.fixture(autouse=True)
def new_metric_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start all metrics at 0, also if another test of this process has started a supervisor."""
    monkeypatch.setattr("prometheus_client.values.ValueClass", prometheus_client.values.MutexValue)


class Fault:
    """A server of one task, whose handler raises `error`."""

    def __init__(self, error: Exception, *, unread: int = 0) -> None:
        self.held = HeldBytes(1 << 20)
        self.held.unread = unread
        self.metrics = HttpMetrics((*PATHS, "other"), tasks=PATHS)
        self.log: list[tuple[int, str, str]] = []
        config = ServeConfig(api_key=("right",))
        observer = RequestObserver(
            labels_by_path(), PATHS, error_formats_by_path(), self.metrics, self.held, cast(Any, self)
        )
        handle = SimpleNamespace(low_priority=False, served=SimpleNamespace(name="a"), compute_type=b"cpu")
        registry = SimpleNamespace(config=config, held=self.held, bodies=BodyReader(100, self.held, 5.0))
        selector = SimpleNamespace(registry=registry, default=handle, is_open=False, path_model=None)

        async def handler(context: RequestContext) -> tuple[bytes, bytes]:
            raise error

        task = TaskEndpoint(cast(Any, selector), handler, True, "a")
        self.server = RequestServer(
            dict.fromkeys(PATHS, task), self._operation, observer, Keys(config), frozenset({PROBE})
        )

    async def _operation(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"] == PROBE
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def note(self, record: Any, seconds: float, client: object) -> None:
        """The access log."""
        self.log.append((record.status, record.outcome, record.model))

    def rejected(self) -> dict[str, float]:
        counts = {reason: counter._value.get() for reason, counter in self.metrics.rejected.items()}
        return {reason: count for reason, count in counts.items() if count}


async def ask(fault: Fault, path: str, key: bytes, body: bytes, *, later: bool, surplus: bool = False) -> Response:
    async with serving(served=0 if surplus else 100, app=fault.server, server=fault.server) as server:
        client = await server.connect()
        head = b"POST %b HTTP/1.1\r\nhost: h\r\n%b\r\ncontent-length: %d\r\n\r\n" % (path.encode(), key, len(body))
        return await client.ask(*([head, body] if later else [head + body]))


def comparable(response: Response) -> tuple[int, list[bytes], Any]:
    """Status, header fields and body, without ids, and without what follows from a body that is still to come."""
    lines = [
        line for line in response.head.split(b"\r\n")[1:] if not line.startswith((b"x-request-id:", b"connection:"))
    ]
    body = json.loads(response.body)
    body.pop("id", None)
    return response.status, sorted(lines), body


def both(make: Any, **options: Any) -> tuple[int, dict[str, float], list[tuple[int, str, str]]]:
    """Status, counts and access log of a request, the same over both transports."""
    seen = []
    for later in (False, True):
        fault: Fault = make()
        with asyncio.Runner(loop_factory=Clock) as runner:
            response = runner.run(ask(fault, later=later, **options))
        assert b"x-request-id: " in response.head
        assert fault.held.requests == fault.metrics.requests_in_flight == 0
        seen.append((comparable(response), fault.rejected(), fault.log))
    assert seen[0] == seen[1]
    (status, _, _), rejected, log = seen[0]
    assert [entry[0] for entry in log] == [status]
    return status, rejected, log


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("error", "status", "reason"), RAISED, ids=lambda each: type(each).__name__)
def test_what_a_handler_raises(
    error: Exception, status: int, reason: str | None, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    if isinstance(error, errors.TaskMissing) and path == "/embed":
        status = 424
    seen, rejected, log = both(partial(Fault, error), path=path, key=KEY, body=b"{}")
    assert (seen, rejected, log[0][2]) == (status, {reason: 1} if reason else {}, "a")
    if isinstance(error, RuntimeError):  # without its message, which may quote a text
        assert "failed: RuntimeError" in caplog.text
        assert "test_serve.py" in caplog.text
        assert "a bug" not in caplog.text


UNREACHED = AssertionError("the handler is not reached")


def test_refused_before_the_handler() -> None:
    path, body = "/embed", b"{}"
    for key in (b"x-nothing: 1", b"authorization: Bearer wrong"):
        assert both(partial(Fault, UNREACHED), path=path, key=key, body=body)[:2] == (401, {"unauthorized": 1})
    assert both(partial(Fault, UNREACHED), path=path, key=KEY, body=b" " * 101)[:2] == (413, {"too_large": 1})
    full = partial(Fault, UNREACHED, unread=1 << 21)
    assert both(full, path=path, key=KEY, body=body)[:2] == (503, {"memory": 1})
    crowded = both(partial(Fault, UNREACHED), path=path, key=KEY, body=body, surplus=True)
    assert crowded[:2] == (503, {"connections": 1})
    fault = Fault(UNREACHED)
    for asked, status, field in ((path, 503, b"retry-after: 1\r\n"), (PROBE, 200, b"")):
        with asyncio.Runner(loop_factory=Clock) as runner:
            response = runner.run(ask(fault, asked, KEY, body, later=True, surplus=True))
        assert (response.status, field in response.head, response.closes) == (status, True, True)
        assert (b"--max-connections" in response.body) == (status == 503)


def test_every_reason_is_tested() -> None:
    tested = {reason for _, _, reason in RAISED if reason} | {"unauthorized", "connections"}
    assert tested == set(REJECT_REASONS)
