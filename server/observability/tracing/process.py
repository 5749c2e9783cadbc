"""The exporting process: records of all others in, spans to the collector out. Where it dies, requests do not notice.

It ends once the supervisor closes their connection, or has died, and has sent what it has read until then.
"""

from __future__ import annotations

import logging
import os
import platform
import select
import signal
import socket
import sys
import threading
import time

import msgspec
from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from embert import __version__
from embert.server.observability.logs import configure_logging, exit_now
from embert.server.observability.metric_memory import MetricMemory
from embert.server.observability.metrics import use_memory
from embert.server.observability.tracing.records import EXPORTER, ExporterStart, decode

__all__ = ["main"]

log = logging.getLogger(__name__)

_CLOCK_INTERVAL_S = 10.0  # somebody may set the machine's time
_LEAVE_S = 10.0  # most seconds for the last spans
_RECEIVE_BYTES = 1 << 18  # more than any message has


def main() -> None:
    """`python -m embert.server.observability.tracing.process CONTROL RECORDS`, the descriptors of two sockets."""
    control = socket.socket(fileno=int(sys.argv[1]))
    records = socket.socket(fileno=int(sys.argv[2]))
    for number in (signal.SIGTERM, signal.SIGINT):  # which all processes may get at once: this one ends last
        signal.signal(number, signal.SIG_IGN)
    start = _read_start(control)
    configure_logging(EXPORTER, start.log_format, start.log_level)
    use_memory(MetricMemory(start.memory_fd), EXPORTER)
    # Not at the top: prometheus_client and the exporter take time to import, and configure_logging comes first.
    from embert.server.observability.tracing.exporter import SpanQueue
    from embert.server.observability.tracing.spans import SpanBuilder
    from embert.server.observability.tracing.trace_metrics import TraceMetrics

    metrics = TraceMetrics()
    queue = SpanQueue(start.url, _resource(start.instance), __version__, metrics, os.environ)
    builder = SpanBuilder()
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(records, select.POLLIN)
    buffer = memoryview(bytearray(_RECEIVE_BYTES))
    clock_due = 0.0
    ended = False
    while not ended:
        ended = control.fileno() in (descriptor for descriptor, _ in poll.poll())
        while (data := _receive(records, buffer)) is not None:
            try:
                message = decode(data)
            except msgspec.MsgspecError as error:
                log.error("a message that holds no records was dropped: %s", error)  # noqa: TRY400
                continue
            if message.dropped:
                metrics.dropped.inc(message.dropped)
            if time.monotonic() >= clock_due:
                builder.clock_ns, clock_due = _clock_ns(), time.monotonic() + _CLOCK_INTERVAL_S
            for record in message.records:
                queue.put(builder.of(record, message.process))
    leave = threading.Timer(_LEAVE_S, exit_now, (1,))  # for a supervisor that has died: a living one kills sooner
    leave.daemon = True
    leave.start()
    queue.close()
    logging.shutdown()


def _read_start(control: socket.socket) -> ExporterStart:
    data = b""
    while not data.endswith(b"\n"):
        piece = control.recv(65536)
        if not piece:
            raise SystemExit("embert.server.observability.tracing.process is started by `embert serve`")
        data += piece
    return msgspec.json.decode(data, type=ExporterStart)


def _receive(records: socket.socket, buffer: memoryview) -> memoryview | None:
    """The next message, in the buffer; None where there is none yet."""
    try:
        return buffer[: records.recv_into(buffer, 0, socket.MSG_DONTWAIT)]
    except BlockingIOError:
        return None


def _clock_ns() -> int:
    """Unix time less CLOCK_MONOTONIC: of some readings the one that was interrupted least."""
    best_ns, clock_ns = 1 << 62, 0
    for _ in range(8):
        before, unix, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        if after - before < best_ns:
            best_ns, clock_ns = after - before, unix - (before + after) // 2
    return clock_ns


def _resource(instance: str) -> dict[str, str]:
    """What all spans say of this server; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come first."""
    ours = {
        "service.name": "embert",
        "service.version": __version__,
        "service.instance.id": instance,
        "host.name": platform.node(),
    }
    found = Resource.create({**ours, **OTELResourceDetector().detect().attributes})
    return {key: str(value) for key, value in found.attributes.items()}


if __name__ == "__main__":
    main()
