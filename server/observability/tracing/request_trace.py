"""Traces of requests, as an HTTP process sees them: which are sampled, and what each records on its way."""

from __future__ import annotations

import random
from typing import Any

from starlette.types import Scope

from embert.server.observability.logs import trace_id as logged_trace_id
from embert.server.observability.tracing.records import RequestRecord, Stage
from embert.server.observability.tracing.sender import RecordSender
from embert.server.observability.tracing.settings import END_BYTES, Sampler
from embert.server.observability.tracing.trace_context import SPAN_BYTES, TRACE_BYTES, Parent, read_parent

__all__ = ["TRACE_KEY", "RequestTrace", "RequestTracer"]

TRACE_KEY = "embert.trace"  # of a sampled request's RequestTrace in its ASGI scope
REASON_MAX = 512  # characters of an error's message
_START_BYTES = TRACE_BYTES - END_BYTES  # of a trace's id, which do not decide whether it is sampled


class RequestTracer:
    """Of one HTTP process, used on its event loop."""

    def __init__(self, sender: RecordSender, sampler: Sampler, quiet: frozenset[str]) -> None:
        """`quiet` are the routes that start no trace, because probes and scrapes ask for them all the time."""
        self._sender, self._sampler, self._quiet = sender, sampler, quiet
        self._bound = sampler.bound

    def begin(self, scope: Scope, route: str, started: float, *, called: bool = True) -> RequestTrace | None:
        """The trace of a request; None where it is not sampled. `route` is its label in metrics.

        `called`: whether it may be of a caller's trace, which its headers tell. The trace is in the scope, too. Log
        lines carry the trace's id from now on, also that of a caller's trace which is not sampled.
        """
        parent = read_parent(scope["headers"]) if called else None
        if parent is None:
            end = random.getrandbits(8 * END_BYTES)  # all of an id that decides, and all that most requests need
            if end >= self._bound or route in self._quiet:
                return None
            trace_id = (random.getrandbits(8 * _START_BYTES) << 8 * END_BYTES | end).to_bytes(TRACE_BYTES)
            logged_trace_id.set(trace_id.hex())
        else:
            trace_id = parent.trace_id
            logged_trace_id.set(trace_id.hex())
            if not (parent.sampled if self._sampler.parent_based else self._sampler.takes(trace_id)):
                return None
        span_id = random.getrandbits(8 * SPAN_BYTES).to_bytes(SPAN_BYTES)
        trace = RequestTrace(self._sender, trace_id, span_id, parent, scope, route, started)
        scope[TRACE_KEY] = trace
        return trace

    def flush(self) -> None:
        """Send the records of finished requests; to be called periodically."""
        self._sender.flush()


class RequestTrace:
    """A sampled request. Times are seconds of CLOCK_MONOTONIC, which perf_counter reads too."""

    __slots__ = ("_parent", "_route", "_scope", "_sender", "_span_id", "_stages", "_started", "bulk", "exception",
                 "model", "reason", "texts", "tokens", "trace_id")  # fmt: skip

    def __init__(
        self,
        sender: RecordSender,
        trace_id: bytes,
        span_id: bytes,
        parent: Parent | None,
        scope: Scope,
        route: str,
        started: float,
    ) -> None:
        self._sender, self.trace_id, self._span_id, self._parent = sender, trace_id, span_id, parent
        self._scope: dict[str, Any] = {name: scope[name] for name in ("method", "scheme", "path")}
        self._route, self._started = route, started
        self._stages: list[Stage] = []
        self.model = ""  # that the request is for
        self.texts = self.tokens = 0
        self.bulk = False
        self.reason = ""  # what the answer says where it is an error
        self.exception = ""  # the name of the one that the app raised

    @property
    def context(self) -> bytes:
        """What an engine must know of it: see records.Member."""
        return self.trace_id + self._span_id + (b"" if self._parent is None else self._parent.state)

    def tokenized(self, ended: float, seconds: float, texts: int, tokens: int) -> None:
        """Note that so many texts have been tokenized."""
        self.texts += texts
        self.tokens += tokens
        self.stage("tokenize", ended - seconds, ended)

    def stage(self, name: str, started: float, ended: float, reason: str = "") -> None:
        """Note a part of the request's way; `reason` says why it failed."""
        self._stages.append(Stage(name, started, ended, reason[:REASON_MAX]))

    def end(self, status: int, request_id: bytes, ended: float) -> None:
        """Record the request, which has been answered with this status. 499: its client left first."""
        parent, known = self._parent, self._route.startswith("/")
        self._sender.add(
            RequestRecord(
                self.trace_id,
                self._span_id,
                b"" if parent is None else parent.span_id,
                b"" if parent is None else parent.state,
                self._scope["method"],
                self._scope["scheme"],
                self._route if known else "",
                self._scope["path"] if known else "",
                status,
                self._started,
                ended,
                request_id.decode(),
                self.model,
                self.texts,
                self.tokens,
                self.bulk,
                self.reason[:REASON_MAX],
                self.exception,
                self._stages,
            )
        )
