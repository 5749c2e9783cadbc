"""`embert serve`: reports every error that can be found before a process starts, then runs the supervisor."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import time
from typing import NoReturn

from embert import __version__
from embert.server.cli.models import plan
from embert.server.config import ConfigError, ServeConfig, model_configs, read_api_keys, tls_context
from embert.server.ipc.signals import handle_signals
from embert.server.observability.logs import configure_logging, exit_now
from embert.server.observability.metric_memory import MetricMemory
from embert.server.observability.metrics import use_memory
from embert.server.observability.tracing.settings import TracingUnavailable, shown, traces_url
from embert.server.supervisor.sockets import listen
from embert.server.supervisor.supervisor import NO_MEMORY, Supervisor

log = logging.getLogger(__name__)

LEAST_FILES, FILES_A_PROCESS = 128, 4  # open files of the supervisor; an HTTP process can then serve 30 connections


def serve(config: ServeConfig, sockets: list[socket.socket] | None = None) -> int:
    """Runs the server until a signal ends it; returns the exit status. `sockets` replace --host and --port."""
    began = time.monotonic()
    configure_logging("supervisor", config.log_format, config.log_level)
    # Process 1 of a container ignores SIGTERM by default, and a model takes minutes to download. The supervisor later
    # installs its own handlers. HTTP processes, which read keys and certificates, do not run yet.
    handle_signals(_exit_during_start, lambda: None)
    context = tls_context(config)
    read_api_keys(config)
    _raise_open_files(config.http_processes)
    configs = model_configs(config)
    traces = _traces_url(config)
    sockets = sockets or listen(config.host, config.port)
    metrics_socket = None
    if config.metrics_port is not None:
        metrics_socket = listen(config.host, config.metrics_port, "--metrics-port")[0]
    log.info("embert   %s", __version__)
    names = [config.name for config in configs]
    try:
        memory = MetricMemory.create(["supervisor"])
    except OSError as error:
        log.error("%s: %s", NO_MEMORY, error)  # noqa: TRY400
        return 1
    use_memory(memory, "supervisor")
    # Imported late: the supervisor keeps little in memory.
    from embert.server.cli.waiting_server import Downloads, waiting_server
    from embert.server.observability.metrics import SupervisorMetrics

    metrics = SupervisorMetrics(names, __version__)
    downloads = Downloads(names)
    with waiting_server(config, context, sockets, metrics_socket, downloads, memory):
        planned, broken = plan(configs, downloads.note)
    if not planned:
        return 1
    if traces is not None:
        log.info("traces   to %s", shown(traces))
    return Supervisor(config, planned, broken, sockets, metrics_socket, began, memory, metrics, traces).run()


def _raise_open_files(http_processes: int) -> None:
    """Raises the limit of open files to the hard limit, for all processes. Raises ConfigError if that is too low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    least = LEAST_FILES + FILES_A_PROCESS * http_processes
    if hard != resource.RLIM_INFINITY and hard < least:
        raise ConfigError(
            f"a process may open {hard} files (ulimit -Hn); with {http_processes} HTTP processes embert needs at least "
            f"{least}, and one more for each connection"
        )


def _traces_url(config: ServeConfig) -> str | None:
    """Returns the URL that spans are sent to, or None. Raises ConfigError if --otlp-endpoint cannot be used.

    OpenTelemetry's variables may be meant for every program of a machine: if they cannot be used, a line is logged.
    """
    try:
        return traces_url(config.otlp_endpoint, os.environ)
    except TracingUnavailable as error:
        if config.otlp_endpoint is not None:
            raise ConfigError(str(error)) from None
        log.warning("%s; serving without traces", error)
        return None


def _exit_during_start(number: int) -> NoReturn:
    """Exits at once: no process has been started yet."""
    log.info("received %s during startup; exiting", signal.Signals(number).name)
    exit_now(0)  # SystemExit would wait for the threads of a download
