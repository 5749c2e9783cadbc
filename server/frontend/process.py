"""The HTTP process: HTTP in, engines behind. Never imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from embert.server.engine_client.background import exit_on_error, keep_running
from embert.server.http.errors import ErrorFormat, ServerError
from embert.server.http.request_head import scrape_form
from embert.server.http.response import Response, send_error, send_response
from embert.server.ipc.control import (
    ControlConnection,
    Drain,
    Drained,
    EngineState,
    Failed,
    Message,
    Ready,
    Reload,
    StartHttp,
)
from embert.server.ipc.shared_counters import SharedCounters
from embert.server.ipc.signals import DRAIN_SIGNALS
from embert.server.observability import gc_tuning
from embert.server.observability.access_log import AccessLog
from embert.server.observability.logs import configure_logging, exit_now
from embert.server.observability.metric_memory import MetricMemory, Region
from embert.server.observability.metrics import use_memory
from embert.server.observability.request_record import DISCONNECTED, REFUSED, RequestRecord
from embert.server.observability.scraping import Exposition, publish

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from embert.server.config import ServeConfig
    from embert.server.engine_client.router import Router
    from embert.server.http.acceptor import Acceptor
    from embert.server.http.connections import Connections
    from embert.server.observability.http_metrics import HttpMetrics
    from embert.server.observability.scraping import Scrapes
    from embert.server.registry.model_registry import ModelRegistry

log = logging.getLogger(__name__)

CLOSING_S = 2  # for clients to read their responses, once the last one is sent
DRAIN_NOTICE_S = 0.25  # the least time that `/readyz` reports draining before the port closes


def main() -> None:
    """`python -m embert.server.frontend.process FD`: one HTTP process; FD is the supervisor's socket."""
    control = ControlConnection.from_fd(int(sys.argv[1]))
    start = control.receive()
    if not isinstance(start, StartHttp):
        raise SystemExit("embert.server.frontend.process is started by `embert serve`")
    name = f"http-{start.http_index}"
    write_line = configure_logging(name, start.config.log_format, start.config.log_level)
    memory = MetricMemory(start.memory_fd)
    region = use_memory(memory, name)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the supervisor sends Reload instead
    sys.setswitchinterval(0.001)  # seconds; tokenizing threads must not hold up the event loop for long
    gc_tuning.before_imports()
    uvloop.run(_serve(start, control, write_line, memory, region))


async def _serve(
    start: StartHttp,
    control: ControlConnection,
    write_line: Callable[[bytes], None],
    memory: MetricMemory,
    region: Region,
) -> None:
    # Not at the top: they take seconds to import, and the logs come first.
    from embert.engine.errors import EngineError
    from embert.server.config import ConfigError
    from embert.server.frontend.app import create_app
    from embert.server.frontend.routes import METRIC_ROUTES, METRIC_TASKS, error_formats_by_path, keyless_paths
    from embert.server.http.acceptor import Acceptor, ConnectionCounts
    from embert.server.http.auth import Keys
    from embert.server.http.connections import Connections, connection_limit, end_slow_readers
    from embert.server.http.protocol import bounded_protocol
    from embert.server.http.tls import Certificates, with_tls
    from embert.server.registry.model_registry import load_registry

    config = start.config
    counters = SharedCounters(start.counters_fd, config.http_processes, len(start.engines), len(start.models))
    try:
        registry = load_registry(start, control, counters, memory, routes=METRIC_ROUTES, tasks=METRIC_TASKS)
        keys = Keys(config, keyless_paths(config.keyless_groups, registry.by_name))
        certificates = Certificates(config) if config.ssl_certfile is not None else None
        access_log = None
        if config.access_log != "off":
            access_log = AccessLog(config.access_log, f"http-{start.http_index}", write_line)
        spans = tracer = None
        if start.traces_url is not None:
            from embert.server.observability.tracing.span_export import start_span_export

            spans = start_span_export(start.traces_url, start.instance)
        if spans is not None:
            from embert.server.observability.tracing.request_trace import RequestTracer

            tracer = RequestTracer(
                spans.tracer, f"http-{start.http_index}", keyless_paths(("probes", "metrics"), registry.by_name)
            )
        app = create_app(registry, keys, access_log, tracer)
    except (EngineError, ConfigError) as error:
        control.send(Failed(str(error)))
        raise SystemExit(1) from None
    router, metrics = registry.router, registry.metrics
    for state in start.engines:
        router.engine_changed(state)
    limit = connection_limit(config.max_connections)
    if limit.served < config.max_connections:
        log.warning(
            "open files are limited: %d connections instead of --max-connections %d",
            limit.served,
            config.max_connections,
        )
    connections = Connections(limit, config.timeout_keep_alive)
    metrics.open_connections = connections.__len__
    metrics.connections_limit.set(limit.served)

    def count_refused(route: str, status: int, client: tuple[str, int] | None) -> None:
        metrics.count(route, status)
        if access_log is not None:
            access_log.note(RequestRecord(route, b"-", status=status), 0.0, client)

    bounds = connections, registry.held, count_refused, error_formats_by_path()
    protocol = bounded_protocol(*bounds, app)
    served: Callable[..., asyncio.Protocol] = protocol
    if certificates is not None:
        served = with_tls(protocol, certificates.current, connections)
    counts = ConnectionCounts(counters.connections, counters.http_alive, start.http_index)
    listening = [socket.socket(fileno=fd) for fd in start.socket_fds]
    servers = [_Server(_uvicorn_config(app, served))]
    options = {"config": servers[0].config, "server_state": servers[0].server_state, "app_state": {}}
    servers[0].acceptor = Acceptor(listening, connections, counts, partial(served, **options))
    jobs = [servers[0].serve([])]
    if start.metrics_fd is not None:
        servers.append(_Server(_uvicorn_config(partial(_send_metrics, registry.scrapes), bounded_protocol(*bounds))))
        jobs.append(servers[1].serve([socket.socket(fileno=start.metrics_fd)]))

    def reload() -> None:
        keys.refresh(forced=True)
        if certificates is not None:
            certificates.refresh()

    draining = _Draining(router, servers, connections, metrics, control, config)
    running = [
        keep_running(_write_metrics(registry, counters, start.http_index)),
        keep_running(publish(region, metrics.exemplars)),
        keep_running(_follow(control, router, draining, reload)),
        keep_running(registry.bodies.watch()),
        keep_running(connections.watch()),
        keep_running(end_slow_readers(connections, registry.held, config.client_timeout, metrics.unread_responses.inc)),
    ]
    if config.api_key_file is not None:
        threading.Thread(target=exit_on_error(keys.follow), name="api-key-file", daemon=True).start()
    for number in DRAIN_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, draining.begin)
    gc_tuning.after_startup()
    control.send(Ready())
    await asyncio.gather(*jobs)
    for task in running:
        task.cancel()
    metrics.write()
    registry.close()
    await router.close()
    if spans is not None:
        spans.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: on SIGTERM it would close its socket before clients see `draining`."""

    acceptor: Acceptor | None = None  # accepts connections in addition to the sockets of `serve`

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.acceptor is not None:
            self.acceptor.start()
            self.servers.append(self.acceptor)  # type: ignore[arg-type]  # it is only closed

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(app: ASGIApp, protocol: Callable[..., asyncio.Protocol]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]  # it is only called
        ws="none",
        interface="asgi3",
        proxy_headers=False,  # the access log has the peer of the connection, which cannot be forged
        lifespan="off",
        access_log=False,  # ours costs less and knows more: observability/access_log.py
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=1,  # requests in flight have had their time before
    )


async def _follow(control: ControlConnection, router: Router, draining: _Draining, reload: Callable[[], None]) -> None:
    """Follow the supervisor's messages; end with it. `reload` runs in a thread: a file system may hang."""
    loop = asyncio.get_running_loop()
    control.socket.setblocking(False)
    readable = asyncio.Event()
    loop.add_reader(control.socket, readable.set)
    messages: Iterable[Message | None] = control.buffered()
    while True:
        for message in messages:
            if message is None:
                exit_now(1)
            if isinstance(message, EngineState):
                router.engine_changed(message)
            elif isinstance(message, Drain):
                draining.begin()
            elif isinstance(message, Reload):
                threading.Thread(target=exit_on_error(reload), name="reload", daemon=True).start()
        await readable.wait()
        readable.clear()
        messages = control.drain()


class _Draining:
    """The end of an HTTP process, on a signal or the supervisor's message."""

    def __init__(
        self,
        router: Router,
        servers: list[_Server],
        connections: Connections,
        metrics: HttpMetrics,
        control: ControlConnection,
        config: ServeConfig,
    ) -> None:
        self._router, self._servers, self._connections = router, servers, connections
        self._metrics, self._control, self._timeout_s = metrics, control, config.drain_timeout
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        if self._task is None:
            self._router.drain()
            self._connections.drain()
            self._task = keep_running(self._run(), may_end=True)

    async def _run(self) -> None:
        """Wait for what is in flight, then close the port. `/readyz` is 503 already."""
        router, metrics = self._router, self._metrics
        metrics.write()
        before = dict(metrics.ended)
        until = time.monotonic() + self._timeout_s
        await asyncio.sleep(DRAIN_NOTICE_S)
        while time.monotonic() < until and (router.pending or self._tasks):
            router.give_up(unready=True)  # no engine is started again while draining
            await asyncio.sleep(0.02)
        router.give_up()
        closing = time.monotonic() + CLOSING_S
        while time.monotonic() < closing and (self._tasks or self._connections.unread_responses):
            await asyncio.sleep(0.02)
        metrics.write()
        since = {outcome: metrics.ended[outcome] - before[outcome] for outcome in before}
        lost = self._tasks + self._connections.unread_responses
        refused = since.pop(REFUSED)
        since.pop(DISCONNECTED)
        self._control.send(Drained(sum(since.values()), refused, lost))
        for server in self._servers:
            server.should_exit = True

    @property
    def _tasks(self) -> int:
        """Number of requests in progress."""
        return len(self._servers[0].server_state.tasks)


async def _write_metrics(registry: ModelRegistry, counters: SharedCounters, http_index: int) -> None:
    while True:
        counters.http_alive[http_index] = time.monotonic()
        await asyncio.sleep(registry.metrics.WRITE_INTERVAL_S)
        registry.write_metrics()
        counters.in_flight[http_index] = registry.metrics.requests_in_flight


_NOTHING = Exposition(b"only GET /metrics is here\n", ((b"content-type", b"text/plain"),))


async def _send_metrics(scrapes: Scrapes, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - ASGI
    """The app on --metrics-port, which gets HTTP requests only."""
    is_metrics = scope["path"] == "/metrics" and scope["method"] in ("GET", "HEAD")
    try:
        exposition = await scrapes.render(scrape_form(scope["headers"])) if is_metrics else _NOTHING
    except ServerError as error:
        await send_error(send, error, ErrorFormat.TEI)
        return
    body = exposition.body
    headers = [*exposition.headers, (b"content-length", b"%d" % len(body))]
    await send_response(send, Response(200 if is_metrics else 404, headers, body))


if __name__ == "__main__":
    main()
