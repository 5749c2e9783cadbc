"""Many cases, several at a time, with known good requests between them."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.fuzz.cases import Case, Maker
from tests.fuzz.client import Exchange, Limits, exchange
from tests.fuzz.judge import judge
from tests.fuzz.routes import Ask, Routes

CANARY_TEXTS = ["Hello, world", "The quick brown fox jumps over the lazy dog."]
# Candidates for the canary: the first that the model supports is used.
CANARIES = (
    Ask("POST", "/embed", {"inputs": CANARY_TEXTS}),
    Ask("POST", "/predict", {"inputs": [[text] for text in CANARY_TEXTS]}),
    Ask("POST", "/embed_sparse", {"inputs": CANARY_TEXTS}),
    Ask("POST", "/embed_all", {"inputs": CANARY_TEXTS}),
    Ask("POST", "/token_classify", {"inputs": CANARY_TEXTS}),
)
CANARY_EVERY = 50  # cases
CANARY_TRIES = 20
FULL_TEXTS, FULL_TEXT_WORDS = 7, 250  # a batch of the CPU encoder but for a few tokens
TOLERANCE = 1e-3  # between batches of other texts the sums are rounded otherwise, by less than this


@dataclass(frozen=True, slots=True)
class Finding:
    """A case that the server did not pass."""

    case: Case
    faults: list[str]
    exchange: Exchange | None = None

    def report(self) -> str:
        lines = [f"case {self.case.index} ({self.case.kind}, the client {self.case.ending.value}):"]
        lines += [f"  {fault}" for fault in self.faults]
        stream = self.case.stream
        lines.append(f"  sent {len(stream)} bytes in {len(self.case.pieces)} pieces: {stream[:1500]!r}")
        if len(stream) > 1500:
            lines[-1] += f" … {stream[-200:]!r}"
        if self.exchange is not None:
            responses = [f"{response.status} {response.body[:100]!r}" for response in self.exchange.responses]
            lines.append(f"  got, {self.exchange.outcome.value}: {responses}")
        return "\n".join(lines)


def fetch_routes(url: str) -> Routes:
    """Reads the routes of the server at `url`."""
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=60) as response:
        return Routes(json.load(response))


@dataclass(slots=True)
class Campaign:
    """Cases 0, 1, … of a maker against one server. Reproducible but for what runs at the same time."""

    address: tuple[str, int]
    maker: Maker
    limits: Limits
    workers: int = 16
    most_findings: int = 1000
    tell: Callable[[str], None] = lambda line: None
    findings: list[Finding] = field(default_factory=list)
    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    requests: int = 0
    canaries: int = 0
    _right: list[float] = field(default_factory=list)

    async def run(self, requests: int) -> None:
        """Send at least `requests` requests, or stop after too many findings."""
        await self.canary()  # which also learns the right response
        cases = self._cases(requests)
        await asyncio.gather(*(self.work(cases) for _ in range(self.workers)))
        await self.canary()

    async def warm(self, routes: Routes) -> None:
        """A sound request of every kind, and full batches: what the first of them takes is not taken for a leak."""
        full = {"inputs": ["word " * FULL_TEXT_WORDS] * FULL_TEXTS}
        full_ones = [Ask("POST", path, full) for path in ("/embed", "/embed_all") if routes.offers(path)]
        for ask in (*routes.examples(), *full_ones):
            body = b"" if ask.method == "GET" else json.dumps(ask.body).encode()
            case = Case(-1, "sound", (_request(ask, b"warm", body),), expected={b"warm": frozenset({200})})
            await self._try(case)
        await self.canary()

    async def try_case(self, case: Case) -> Finding | None:
        """The case once; what was wrong with it."""
        try:
            done = await exchange(self.address, case, self.limits)
        except OSError as error:
            return Finding(case, [f"no connection: {error!r}"])
        self.statuses.update(response.status for response in done.responses)
        self.outcomes[done.outcome.value] += 1
        faults = judge(done)
        return Finding(case, faults, done) if faults else None

    def _cases(self, requests: int) -> Iterator[Case]:
        index = 0
        while self.requests < requests and len(self.findings) < self.most_findings:
            case = self.maker.make(index)
            self.requests += case.requests
            self.kinds[case.kind] += 1
            yield case
            index += 1

    async def work(self, cases: Iterator[Case]) -> None:
        """Try the cases one after another; several may share an iterator."""
        for case in cases:
            await self._try(case)
            if case.index % CANARY_EVERY == CANARY_EVERY - 1:
                await self.canary()

    async def _try(self, case: Case) -> None:
        finding = await self.try_case(case)
        if finding is not None:
            self.findings.append(finding)
            self.tell(finding.report())

    async def canary(self) -> None:
        """A good request gets its right numbers, at the latest when the server has caught up."""
        self.canaries += 1
        name = b"canary-%d" % self.canaries
        ask = next(ask for ask in CANARIES if self.maker.routes.offers(ask.path))
        case = Case(-1, "canary", (_request(ask, name, json.dumps(ask.body).encode()),))
        for _ in range(CANARY_TRIES):
            done = await exchange(self.address, case, self.limits)
            faults = judge(done)
            if not faults and done.responses[0].status in (429, 503):
                await asyncio.sleep(0.5)
                continue
            if not faults:
                faults = self._wrong(done)
            break
        else:
            faults = [f"was refused {CANARY_TRIES} times"]
        if faults:
            self.findings.append(Finding(case, faults, done))
            self.tell(self.findings[-1].report())

    def _wrong(self, done: Exchange) -> list[str]:
        response = done.responses[0]
        if response.status != 200:
            return [f"a good request got {response.status}"]
        numbers = [*_numbers(json.loads(response.body))]
        self._right = self._right or numbers
        same = len(numbers) == len(self._right) and all(
            abs(a - b) < TOLERANCE for a, b in zip(numbers, self._right, strict=True)
        )
        return [] if same else ["a good request got vectors that are not its own"]


def _numbers(value: Any) -> Iterator[float]:
    """All numbers of a response, without weights that may as well be 0."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, dict) and value.get("value", 1) > TOLERANCE:
        for each in value.values():
            yield from _numbers(each)


def memory(pid: int) -> dict[int, int]:
    """RSS in bytes of a process and of all its descendants, by pid."""
    root = psutil.Process(pid)
    sizes = {}
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            sizes[process.pid] = process.memory_info().rss
    return sizes


def peaks(pids: Iterable[int]) -> dict[int, int]:
    """The most RSS in bytes that each process has had, by pid."""
    sizes = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            sizes[pid] = 1024 * int(status.split("VmHWM:")[1].split()[0])
    return sizes


def grown(before: dict[int, int], after: dict[int, int], limit: int) -> list[str]:
    """Faults of `after`: processes that ended or began, and those that hold over `limit` bytes more."""
    if before.keys() != after.keys():
        return [f"processes ended or began: {sorted(before)} before, {sorted(after)} after"]
    return [
        f"process {pid} holds {(after[pid] - before[pid]) / 1e6:.0f} MB more; the limit is {limit / 1e6:.0f}"
        for pid in before
        if after[pid] - before[pid] > limit
    ]


def _request(ask: Ask, name: bytes, body: bytes) -> bytes:
    head = b"%b %b HTTP/1.1\r\nHost: fuzz\r\nX-Request-Id: %b\r\n" % (ask.method.encode(), ask.path.encode(), name)
    if ask.method == "POST":
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    return head + b"\r\n" + body
