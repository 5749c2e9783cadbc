"""benchmarks.soak: clients that know what they should get, while the engine is killed, and for a long time."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import statistics
import time
from collections import Counter

import numpy as np
import psutil
import uvloop

from benchmarks.lib.running_server import Serving, embert
from benchmarks.lib.texts import QUERY_TOKENS, texts
from benchmarks.soak.slo import Line
from benchmarks.soak.verifying_client import Client, right
from embert.engine import load_model

__all__ = ["kills", "mixed"]

KILL_EVERY_S = 5.0
SETTLING_S = 120.0  # of the long run, before memory is looked at
SAMPLE_EVERY_S = 5.0


class _Crowd:
    """Clients that ask for what they know, and note when they were answered, and how."""

    def __init__(self, port: int) -> None:
        tokenizer = load_model().transformer_folder / "tokenizer.json"
        self.port = port
        self.texts = [text.text for text in texts(QUERY_TOKENS, 256, tokenizer)]
        self.expected = np.empty((0, 0), np.float32)  # [texts, dimensions]
        self.statuses: Counter[int] = Counter()
        self.wrong = 0
        self.slowest_s = 0.0
        self.good: list[tuple[float, float]] = []  # when a request that got 200 was sent, and answered
        self.stopped = False

    async def learn(self) -> None:
        """Ask for every text by itself, while nothing is wrong yet."""
        client = Client(self.port)
        rows = []
        for text in self.texts:
            answer = await client.embed([text])
            assert answer.vectors is not None
            rows.append(answer.vectors[0])
        self.expected = np.stack(rows)
        client.close()

    async def ask(self, number: int, pause_s: float, largest: int, **headers: str) -> None:
        """One client, until everybody is stopped."""
        client, random = Client(self.port), np.random.default_rng(number)
        while not self.stopped:
            chosen = random.integers(0, len(self.texts), int(random.integers(1, largest + 1)))
            sent = time.monotonic()
            answer = await client.embed([self.texts[index] for index in chosen], **headers)
            answered = time.monotonic()
            self.statuses[answer.status] += 1
            self.slowest_s = max(self.slowest_s, answered - sent)
            if answer.status == 200:
                self.wrong += not right(answer, self.expected[chosen])
                self.good.append((sent, answered))
            await asyncio.sleep(pause_s if answer.status == 200 else max(0.05, pause_s))
        client.close()


def kills(options: argparse.Namespace, seconds: float, serve_options: list[str]) -> list[Line]:
    """What clients get while the engine is killed again and again."""
    del options
    with embert(*serve_options) as serving:
        return uvloop.run(_run_kills(serving, seconds))


async def _run_kills(serving: Serving, seconds: float) -> list[Line]:
    crowd = _Crowd(serving.port)
    await crowd.learn()
    clients = [asyncio.create_task(crowd.ask(number, 0.01, 16)) for number in range(8)]
    await asyncio.sleep(2.0)
    kills: list[float] = []
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        for process in _children(serving, "embert.server.worker.process"):
            process.send_signal(signal.SIGKILL)
            kills.append(time.monotonic())
        await asyncio.sleep(began + KILL_EVERY_S * len(kills) - time.monotonic())
    await asyncio.sleep(KILL_EVERY_S)
    crowd.stopped = True
    await asyncio.gather(*clients)
    recoveries = [min(answered for sent, answered in crowd.good if sent > kill) - kill for kill in kills]
    statuses = ", ".join(f"{status}: {count}" for status, count in sorted(crowd.statuses.items()))
    return [
        Line("kill -9 of the engine", f"{len(kills)} times, every {KILL_EVERY_S:g} s"),
        Line("answers", statuses, "200 and 503 only", kept=set(crowd.statuses) <= {200, 503}),
        Line("wrong vectors", str(crowd.wrong), "0", kept=crowd.wrong == 0),
        Line("slowest answer", f"{crowd.slowest_s:.1f} s"),
        Line(
            "from a kill to an answer to a request sent after it",
            f"{statistics.median(recoveries):.1f} s, worst {max(recoveries):.1f} s",
            "4 s",
            kept=max(recoveries) <= 4.0,
        ),
    ]


def _children(serving: Serving, module: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(serving.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if module in process.cmdline():
                found.append(process)
    return found


def mixed(options: argparse.Namespace, seconds: float, serve_options: list[str]) -> list[Line]:
    """Whether memory or descriptors grow."""
    del options
    with embert(*serve_options) as serving:
        return uvloop.run(_run_mixed(serving, seconds))


async def _run_mixed(serving: Serving, seconds: float) -> list[Line]:
    """Queries, bulk, requests that are wrong, clients that leave, connections that come and go."""
    crowd = _Crowd(serving.port)
    await crowd.learn()
    jobs = [asyncio.create_task(crowd.ask(number, 0.05, 4)) for number in range(4)]
    jobs += [asyncio.create_task(crowd.ask(100 + number, 0.2, 200, x_priority="bulk")) for number in range(2)]
    jobs.append(asyncio.create_task(_leave(crowd)))
    jobs.append(asyncio.create_task(_send_nonsense(crowd)))
    processes = {"supervisor": psutil.Process(serving.process.pid)}
    for module in ("embert.server.api.process", "embert.server.worker.process"):
        for number, process in enumerate(_children(serving, module)):
            processes[f"{module.split('.')[1]} {number}"] = process
    samples: dict[str, list[tuple[float, int, int]]] = {name: [] for name in processes}
    began = time.monotonic()
    while (age_s := time.monotonic() - began) < seconds:
        for name, process in processes.items():
            samples[name].append((age_s, process.memory_info().rss, process.num_fds()))
        await asyncio.sleep(SAMPLE_EVERY_S)
    crowd.stopped = True
    await asyncio.gather(*jobs)
    await asyncio.sleep(1.0)
    settled_s = min(SETTLING_S, seconds / 4)
    lines = [
        Line("time", f"{seconds:.0f} s"),
        Line(
            "answers",
            ", ".join(f"{status}: {count}" for status, count in sorted(crowd.statuses.items())),
            "200 and 429 only",
            kept=set(crowd.statuses) <= {200, 429},
        ),
        Line("wrong vectors", str(crowd.wrong), "0", kept=crowd.wrong == 0),
    ]
    for name, taken in samples.items():
        lines += _memory_lines(name, taken, settled_s, seconds)
    return lines


def _memory_lines(name: str, taken: list[tuple[float, int, int]], settled_s: float, seconds: float) -> list[Line]:
    window_s = min(60.0, seconds / 8)
    first = [sample for sample in taken if settled_s <= sample[0] < settled_s + window_s]
    last = [sample for sample in taken if sample[0] >= seconds - window_s]
    before, after = (statistics.median(sample[1] for sample in some) / 1e6 for some in (first, last))
    opened, open_at_last = (max(sample[2] for sample in some) for some in (first, last))
    return [
        Line(
            f"memory of {name}",
            f"{before:.1f} MB after {settled_s:.0f} s, {after:.1f} MB at last ({after / before - 1:+.1%})",
            "+2%",
            kept=after < 1.02 * before,
        ),
        Line(f"descriptors of {name}", f"{opened}, {open_at_last} at last", "no more", kept=open_at_last <= opened + 2),
    ]


async def _leave(crowd: _Crowd) -> None:
    """A client that never waits for its answer."""
    while not crowd.stopped:
        client = Client(crowd.port)
        asking = asyncio.ensure_future(client.embed(crowd.texts * 2))
        await asyncio.sleep(0.1)
        client.close()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0.5)


async def _send_nonsense(crowd: _Crowd) -> None:
    """Connections that begin something and close."""
    pieces = [
        b"",
        b"\x16\x03\x01",
        b"POST /embed HTTP/1.1\r\ncontent-length: 9\r\n\r\n{",
        b"GET /nope HTTP/1.1\r\n\r\n",
    ]
    turn = 0
    while not crowd.stopped:
        turn += 1
        _, writer = await asyncio.open_connection("127.0.0.1", crowd.port)
        writer.write(pieces[turn % len(pieces)])
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.sleep(0.05)
