"""Fuzz a server: `python -m tests.fuzz --requests 10000`. Ends with status 1 when anything was found."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import shlex
import time
import urllib.parse
from collections.abc import Iterator, Sequence

from tests.fuzz.campaign import Campaign, fetch_routes, grown, memory, peaks
from tests.fuzz.cases import SOUND, Maker
from tests.fuzz.client import Limits
from tests.server.live import STAND_IN, Live, live

REQUEST_TIMEOUT_S = 5.0  # --request-timeout of the command's own server
WORKERS = 16  # connections at a time
PEAK = 400_000_000  # bytes that a process may hold more at any time: --max-held-bytes, and what parsing takes
SETTLE_S = 30.0  # in which it may let go of the rest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, help="default: another each time, which is printed")
    parser.add_argument("--url", help="of a running server; its memory and log are then not looked at")
    parser.add_argument("--slack", type=float, default=1.0, help="seconds that a response may come after its deadline")
    parser.add_argument("--timeout", type=float, default=60.0, help="--request-timeout of the server at --url")
    parser.add_argument("--memory", type=float, default=50.0, help="MB that a process may hold more afterwards")
    parser.add_argument("--findings", type=int, default=50, help="stop after this number of findings")
    parser.add_argument("--serve-options", default="", help="options for `embert serve`, as one string")
    parser.add_argument("--real", action="store_true", help="serve the default model instead of the tests' stand-in")
    parser.add_argument("--only", type=int, help="only the case of this number")
    options = parser.parse_args(argv)
    if options.seed is None:
        options.seed = secrets.randbelow(1 << 32)
    print(f"seed {options.seed}")
    with _server(options) as server:
        return _run(options, server)


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[Live | None]:
    """Starts a server, unless there is a url."""
    if options.url is not None:
        yield None
        return
    chosen = () if options.real else STAND_IN
    more = ("--request-timeout", str(REQUEST_TIMEOUT_S), *shlex.split(options.serve_options))
    env = {"STAND_IN_ORDERS": "no"}
    with live(*chosen, *more, env=env, status=None) as server:
        yield server
    # Outside of the finding, so that a server that cannot end does not hide what was found.
    if server.process.returncode != 0:
        raise SystemExit(f"the server ended with status {server.process.returncode}")


def _run(options: argparse.Namespace, server: Live | None) -> int:
    url = options.url if server is None else server.url
    limits = Limits(options.timeout if server is None else REQUEST_TIMEOUT_S, options.slack)
    place = urllib.parse.urlsplit(url)
    routes = fetch_routes(url)
    maker = Maker(routes, options.seed)
    campaign = Campaign((place.hostname or "", place.port or 80), maker, limits, WORKERS, options.findings, print)
    if options.only is not None:
        finding = asyncio.run(campaign.try_case(maker.make(options.only)))
        print("nothing found" if finding is None else finding.report())
        return int(finding is not None)

    asyncio.run(campaign.warm(routes))
    before = {} if server is None else memory(server.process.pid)
    began = time.monotonic()
    asyncio.run(campaign.run(options.requests))
    took_s = time.monotonic() - began
    faults: list[str] = []
    served = sum(campaign.statuses[status] for status in SOUND)  # a busy machine may say 503
    if served < campaign.requests / 4 and not campaign.findings:
        faults.append(f"only {served} responses of a status that sound requests get")
    if server is not None:
        pid, limit, patience = server.process.pid, int(options.memory * 1e6), time.monotonic() + SETTLE_S
        while (kept := grown(before, memory(pid), limit)) and time.monotonic() < patience:
            time.sleep(0.2)
        highest = peaks(before)
        faults += kept + [f"at its peak, {fault}" for fault in grown(before, highest, PEAK)]
        print("peaks", {pid: f"{size / 1e6:.0f} MB, from {before[pid] / 1e6:.0f}" for pid, size in highest.items()})
    print(
        f"{campaign.requests} requests on {sum(campaign.kinds.values())} connections in {took_s:.0f} s, {len(routes)} "
        f"routes, {campaign.canaries} known good ones between them\nkinds {dict(campaign.kinds)}\n"
        f"responses {dict(sorted(campaign.statuses.items()))}\nconnections {dict(campaign.outcomes)}"
    )
    for finding in campaign.findings:
        command = f"python -m tests.fuzz --seed {options.seed} --only {finding.case.index}"
        print(f"{command}: {'; '.join(finding.faults)[:300]}")
    for fault in faults:
        print(fault)
    found = len(campaign.findings) + len(faults)
    print(f"{found} faults found; seed {options.seed}" if found else "nothing found")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
