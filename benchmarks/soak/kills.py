"""The engine process is killed every few seconds while clients check every response."""

from __future__ import annotations

import asyncio
import signal
import statistics
import time

from benchmarks.lib.running_server import RunningServer
from benchmarks.soak.clients import Clients, Objective

KILL_EVERY_S = 5.0


async def kills(server: RunningServer, seconds: float) -> list[Objective]:
    """Measure statuses, wrong vectors and the time to recover."""
    clients = Clients(server.port)
    await clients.learn()
    running = [asyncio.create_task(clients.run(seed, 0.01, 16)) for seed in range(8)]
    await asyncio.sleep(2.0)
    killed: list[float] = []
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        for kind, process in list(server.processes()):
            if kind == "engine":
                process.send_signal(signal.SIGKILL)
                killed.append(time.monotonic())
        await asyncio.sleep(began + KILL_EVERY_S * len(killed) - time.monotonic())
    await asyncio.sleep(KILL_EVERY_S)
    clients.stopped = True
    await asyncio.gather(*running)
    recoveries = [min(ended for sent, ended in clients.good if sent > kill) - kill for kill in killed]
    return [
        Objective("kill -9 of the engine", f"{len(killed)} times, every {KILL_EVERY_S:g} s"),
        *clients.objectives(200, 503),
        Objective("slowest response", f"{clients.slowest_s:.1f} s"),
        Objective(
            "from a kill to a response to a request sent after it",
            f"{statistics.median(recoveries):.1f} s, worst {max(recoveries):.1f} s",
            "4 s",
            kept=max(recoveries) <= 4.0,
        ),
    ]
