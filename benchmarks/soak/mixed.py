"""A long run of mixed work, well-formed and not: memory and file descriptors must not grow."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import Counter

import psutil

from benchmarks.lib.running_server import RunningServer
from benchmarks.soak.clients import Client, Clients, Objective

SETTLING_S = 120.0  # before the first look at memory
SAMPLE_EVERY_S = 5.0


async def mixed(server: RunningServer, seconds: float) -> list[Objective]:
    """Measure the growth of memory and descriptors, by process.

    Next to queries, bulk requests, malformed requests, clients that leave, connections that come and go.
    """
    clients = Clients(server.port)
    await clients.learn()
    jobs = [asyncio.create_task(clients.run(seed, 0.05, 4)) for seed in range(4)]
    jobs += [asyncio.create_task(clients.run(100 + seed, 0.2, 200, x_priority="bulk")) for seed in range(2)]
    jobs.append(asyncio.create_task(_leave(clients)))
    jobs.append(asyncio.create_task(_send_malformed(clients)))
    processes = _named_processes(server)
    samples: dict[str, list[tuple[float, int, int]]] = {name: [] for name in processes}  # age s, bytes, descriptors
    began = time.monotonic()
    while (age_s := time.monotonic() - began) < seconds:
        for name, process in processes.items():
            samples[name].append((age_s, process.memory_info().rss, process.num_fds()))
        await asyncio.sleep(SAMPLE_EVERY_S)
    clients.stopped = True
    await asyncio.gather(*jobs)
    await asyncio.sleep(1.0)
    objectives = [Objective("time", f"{seconds:.0f} s"), *clients.objectives(200, 429)]
    for name, taken in samples.items():
        objectives += _growth(name, taken, min(SETTLING_S, seconds / 4), seconds)
    return objectives


def _named_processes(server: RunningServer) -> dict[str, psutil.Process]:
    """Return the supervisor, and the processes of each kind by number: "http 0", "engine 0"."""
    named: dict[str, psutil.Process] = {}
    seen: Counter[str] = Counter()
    for kind, process in server.processes():
        if process.pid == server.process.pid:
            named[kind] = process
        elif kind != server.root:
            named[f"{kind} {seen[kind]}"] = process
            seen[kind] += 1
    return named


def _growth(name: str, taken: list[tuple[float, int, int]], settled_s: float, seconds: float) -> list[Objective]:
    window_s = min(60.0, seconds / 8)
    first = [sample for sample in taken if settled_s <= sample[0] < settled_s + window_s]
    last = [sample for sample in taken if sample[0] >= seconds - window_s]
    before, after = (statistics.median(sample[1] for sample in some) / 1e6 for some in (first, last))
    opened, open_at_end = (max(sample[2] for sample in some) for some in (first, last))
    return [
        Objective(
            f"memory of {name}",
            f"{before:.1f} MB after {settled_s:.0f} s, {after:.1f} MB at the end ({after / before - 1:+.1%})",
            "+2%",
            kept=after < 1.02 * before,
        ),
        Objective(
            f"descriptors of {name}", f"{opened}, {open_at_end} at the end", "no more", kept=open_at_end <= opened + 2
        ),
    ]


async def _leave(clients: Clients) -> None:
    """Close the connection before each response."""
    while not clients.stopped:
        client = Client(clients.port)
        asking = asyncio.ensure_future(client.embed(clients.texts * 2))
        await asyncio.sleep(0.1)
        client.close()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await asyncio.sleep(0.5)


async def _send_malformed(clients: Clients) -> None:
    """Open connections, send the beginning of something or nothing, and close them."""
    pieces = [
        b"",
        b"\x16\x03\x01",  # a TLS handshake
        b"POST /embed HTTP/1.1\r\ncontent-length: 9\r\n\r\n{",
        b"GET /nope HTTP/1.1\r\n\r\n",
    ]
    turn = 0
    while not clients.stopped:
        turn += 1
        _, writer = await asyncio.open_connection("127.0.0.1", clients.port)
        writer.write(pieces[turn % len(pieces)])
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.sleep(0.05)
