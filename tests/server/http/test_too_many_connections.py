"""Connections above the limit: idle ones make room, the others are refused."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor

import httpx

from embert.server.http.protocol import SURPLUS_S
from tests.server.http.echo_server import EARLY, GET, play, post, serving, skip
from tests.server.live import STAND_IN, TRUST, live, until
from tests.server.stand_in import SLEEP


def test_an_idle_connection_makes_room() -> None:
    async def scene() -> None:
        async with serving(served=2) as server:
            oldest, other = await server.connect(), await server.connect()
            assert await oldest.is_open()
            assert await other.is_open()
            assert await oldest.is_open()  # so the other has waited for longer
            third = await server.connect()
            assert (await third.ask(GET)).body == b"/livez "
            assert not await other.rest()
            assert await oldest.is_open()

    play(scene)


def test_too_many_connections() -> None:
    async def scene() -> None:
        async with serving(served=2, surplus=1) as server:
            busy = [await server.connect() for _ in range(2)]
            for client in busy:
                await client.send(post(b"a", "/slow"))
            while len(server.asked) < 2:
                await asyncio.sleep(0.002)
            third = await server.connect()
            assert not await (await server.connect()).rest()  # not even an answer
            answer = await third.ask(GET)
            assert (answer.body, answer.closes) == (b"/livez  surplus", True)  # marked, for AuthMiddleware
            assert not await third.rest()
            await server.count(2)
            for sent in (b"", b"\r\n", GET[:9], EARLY, post(b"a", "/slow")):
                client = await server.connect()
                await client.send(sent)
                if sent == EARLY:
                    assert (await client.answer()).body == b"early surplus"
                await skip(SURPLUS_S + 0.1)
                await client.rest()
                await server.count(2)
            server.going.set()
            assert [(await client.answer()).status for client in busy] == [200, 200]

    play(scene)


def test_too_many_connections_are_refused_but_for_probes() -> None:
    with (
        live(*STAND_IN, "--workers", "1", "--max-connections", "1", "--metrics-port", "0") as server,
        server.client() as first,
        ThreadPoolExecutor(1) as pool,
    ):
        assert first.post("/embed", json={"inputs": "a"}).status_code == 200
        busy = pool.submit(first.post, "/embed", json={"inputs": [[101, SLEEP + 40, 102]]})
        admitted = re.compile(r"^embert_admitted_tokens{.*} 3.0$", re.MULTILINE)
        until(
            lambda: bool(admitted.search(httpx.get(f"{server.metrics_url}/metrics", verify=TRUST).text)),
            what="the request",
        )
        refused = server.post("/v1/embeddings", {"input": "a"})
        assert (refused.status_code, refused.headers["retry-after"], refused.headers["connection"]) == (
            503,
            "1",
            "close",
        )
        assert "1 connections, the limit (--max-connections)" in refused.json()["error"]["message"]
        assert re.fullmatch("[0-9a-f]{32}", refused.headers["x-request-id"])
        assert server.get("/readyz").status_code == 200
        assert busy.result().status_code == 200
        metrics = server.metrics()  # takes the idle connection's place
        assert metrics['embert_rejected_total{reason="connections"}'] >= 1
        assert metrics['embert_requests_total{route="/v1/embeddings",status="503"}'] == 1
