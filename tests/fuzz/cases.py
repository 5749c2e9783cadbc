"""Cases: what is written to one connection, in which pieces, and how the connection ends."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.fuzz import bodies, heads
from tests.fuzz.heads import Head
from tests.fuzz.routes import Ask, Routes

SOUND = frozenset({200, 429, 503})  # of a request with nothing wrong about it
PIECES = 50  # of a tiny fragmentation
TIMEOUT_S, CUT_TIMEOUT_S = 2.0, 0.5  # X-Request-Timeout; the second where a body is missing


class Ending(enum.Enum):
    """The client's last action, when everything is written."""

    ASK = "waits for the responses, then asks once more"
    HALF = "closes its sending side"
    CLOSE = "closes"
    RESET = "resets the connection"


@dataclass(frozen=True, slots=True)
class Case:
    index: int
    kind: str
    pieces: tuple[bytes, ...]
    requests: int = 1  # approximate number
    pause_s: float = 0.0  # between pieces
    ending: Ending = Ending.ASK
    expected: dict[bytes, frozenset[int]] = field(default_factory=dict)  # statuses, by X-Request-Id

    @property
    def stream(self) -> bytes:
        return b"".join(self.pieces)


@dataclass(slots=True)
class _Draft:
    """A case in the making."""

    random: Random
    index: int
    timeout_s: float = TIMEOUT_S
    stream: bytes = b""
    requests: int = 0
    ending: Ending = Ending.ASK
    expected: dict[bytes, frozenset[int]] = field(default_factory=dict)

    def head(self, ask: Ask) -> Head:
        head = Head(ask.method.encode(), ask.path.encode())
        head.fields = [
            b"Host: fuzz",
            b"Content-Type: application/json",
            b"X-Request-Id: " + self.request_id,
            b"X-Request-Timeout: %g" % self.timeout_s,
        ]
        if self.random.random() < 0.1:
            head.fields.append(b"Accept: application/octet-stream")
        return head

    @property
    def request_id(self) -> bytes:
        """Id of the request that is added next."""
        return b"fuzz-%d-%d" % (self.index, self.requests)

    def add(self, head: Head, body: bytes = b"", *, chunked: bytes | None = None) -> None:
        """A request whose framing is right, unless its head already says otherwise."""
        if chunked is not None:
            head.fields.append(b"Transfer-Encoding: chunked")
            body = chunked
        elif body or head.method == b"POST":
            head.fields.append(b"Content-Length: %d" % len(body))
        self.stream += head.render() + body
        self.requests += 1

    def add_sound(self, ask: Ask, *, long: bool = False) -> None:
        if ask.example:
            self.expected[self.request_id] = SOUND
        body = self.sound_body(ask)
        if long and body:
            body += b" " * self.random.choice((10_000, 70_000, 300_000))
        if body and self.random.random() < 0.2:
            self.add(self.head(ask), chunked=heads.chunked(body, self.random))
        else:
            self.add(self.head(ask), body)

    def sound_body(self, ask: Ask) -> bytes:
        return b"" if ask.method == "GET" else bodies.encode(ask.body, self.random)


class Maker:
    """Makes cases: the same for the same seed, index and routes."""

    def __init__(self, routes: Routes, seed: int) -> None:
        self.routes, self._seed = routes, seed
        self._kinds: dict[str, tuple[float, Callable[[_Draft], None]]] = {
            "json": (32.0, self._json),
            "multiplied": (6.0, self._multiplied),
            "head": (20.0, self._head),
            "chunked": (12.0, self._chunked),
            "upgrade": (8.0, self._upgrade),
            "pipeline": (12.0, self._pipeline),
            "cut": (6.0, self._cut),
            "bytes": (10.0, self._bytes),
        }

    def make(self, index: int) -> Case:
        random = Random(f"{self._seed}/{index}")
        kind = random.choices(list(self._kinds), [weight for weight, _ in self._kinds.values()])[0]
        draft = _Draft(random, index)
        self._kinds[kind][1](draft)
        pieces, pause_s = _fragments(draft.stream, random)
        return Case(index, kind, pieces, max(1, draft.requests), pause_s, draft.ending, draft.expected)

    def _json(self, draft: _Draft) -> None:
        ask = self.routes.post(draft.random)
        body = bodies.mutated(ask.body, draft.random)
        if draft.random.random() < 0.2:
            draft.add(draft.head(ask), chunked=heads.chunked(body, draft.random))
        else:
            draft.add(draft.head(ask), body)

    def _multiplied(self, draft: _Draft) -> None:
        ask = self.routes.post(draft.random)
        draft.add(draft.head(ask), bodies.multiplied(ask.body, draft.random))

    def _head(self, draft: _Draft) -> None:
        ask = self.routes.some(draft.random)
        head = draft.head(ask)
        body = draft.sound_body(ask)
        if body:
            head.fields.append(b"Content-Length: %d" % len(body))
        heads.odd(head, draft.random)
        draft.stream += head.render() + body
        draft.requests += 1

    def _chunked(self, draft: _Draft) -> None:
        ask = self.routes.post(draft.random)
        draft.timeout_s = CUT_TIMEOUT_S
        body = draft.random.choice((draft.sound_body(ask), heads.INNER, b"0\r\n\r\n" + heads.INNER))
        draft.add(draft.head(ask), chunked=heads.odd_chunked(body, draft.random))
        if draft.random.random() < 0.3:
            draft.add_sound(self.routes.some(draft.random))

    def _upgrade(self, draft: _Draft) -> None:
        random = draft.random
        ask = self.routes.some(random)
        head = draft.head(ask)
        body = random.choice((draft.sound_body(ask), heads.INNER))
        match random.choices(range(4), (70, 10, 8, 12))[0]:
            case 0:
                heads.upgrade(head, random)
            case 1:
                head.method, head.target = b"CONNECT", random.choice((b"evil:443", b"/embed", b"/"))
            case 2:
                draft.stream += b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
                draft.requests += 1
                return
            case _:
                head.fields += [b"Expect: 100-continue"] * random.choice((1, 1, 2))
        if random.random() < 0.2:
            draft.add(head, chunked=heads.chunked(body, random))
        else:
            draft.add(head, body)
        if random.random() < 0.5:
            draft.add_sound(self.routes.some(random))

    def _pipeline(self, draft: _Draft) -> None:
        random = draft.random
        for _ in range(random.randint(2, 8)):
            match random.choices(range(6), (50, 20, 14, 8, 6, 2))[0]:
                case 0:
                    draft.add_sound(self.routes.some(random))
                case 1:
                    draft.add_sound(self.routes.post(random), long=True)
                case 2:
                    self._json(draft)
                case 3:
                    self._upgrade(draft)
                case 4:
                    self._head(draft)
                case _:
                    draft.stream += random.choice((b"\r\n", b"\r\n\r\n", b"\n", b"garbage", b"\x00", b"}"))

    def _cut(self, draft: _Draft) -> None:
        random = draft.random
        draft.timeout_s = CUT_TIMEOUT_S
        for _ in range(random.choice((1, 1, 2, 4))):
            draft.add_sound(self.routes.some(random), long=random.random() < 0.2)
        if random.random() < 0.8:
            draft.stream = draft.stream[: random.randrange(1, len(draft.stream) + 1)]
        draft.ending = random.choice(list(Ending))

    def _bytes(self, draft: _Draft) -> None:
        random = draft.random
        draft.timeout_s = CUT_TIMEOUT_S
        for _ in range(random.choice((1, 1, 2, 3))):
            draft.add_sound(self.routes.some(random))
        draft.expected.clear()
        data = bytearray(draft.stream)
        head_end = data.find(b"\r\n\r\n")
        for _ in range(random.choice((1, 1, 2, 3, 6))):
            place = random.randrange(head_end + 4 if random.random() < 0.7 else len(data) + 1)
            match random.randrange(4):
                case 0 if place < len(data):
                    data[place] = random.randrange(256)
                case 1:
                    del data[place : place + random.choice((1, 2, 8, 30))]
                case 2:
                    data[place:place] = random.choice(
                        (b"\r\n", b"\n", b"\r", b"\x00", b" ", b"\t", b":", b"\xff", b"0\r\n\r\n")
                    )
                case _:
                    at = data.find(b"\r\n", place) + 2
                    data[at:at] = random.choice(heads.ODD_FIELDS) + b"\r\n"
        draft.stream = bytes(data)


def _fragments(stream: bytes, random: Random) -> tuple[tuple[bytes, ...], float]:
    """The stream whole, or in a few pieces, or its beginning in tiny ones; and the pause between them."""
    match random.choices(range(3), (50, 35, 15))[0]:
        case 0:
            cuts: list[int] = []
        case 1:
            cuts = sorted(random.randrange(len(stream) + 1) for _ in range(random.randint(1, 6)))
        case _:
            size = random.choice((1, 3, 16))
            first = random.randrange(max(1, len(stream) - PIECES * size))
            cuts = list(range(first, min(len(stream), first + PIECES * size), size))
    edges = [0, *cuts, len(stream)]
    pieces = tuple(stream[start:stop] for start, stop in itertools.pairwise(edges) if start < stop)
    return pieces, random.choice((0.0, 0.0, 0.0005, 0.005)) if len(pieces) < 20 else 0.0002
