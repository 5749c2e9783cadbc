"""Texts and keys are in no log, no metric and no error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx

from embert.engine import Encoder, PackedBatch
from embert.engine.errors import EncoderError
from embert.engine.model import Model
from tests.server.connections import connect, read_all
from tests.server.live import Live, live
from tests.server.stand_in import StandIn

MARKER = "xyzzy-7f3a-marker"


class Touchy(StandIn):
    """Fails on long texts: with an error, or with a bug."""

    def wait(self, ticket: Any) -> Any:
        batch: PackedBatch = ticket
        longest = int(max(batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]))
        if longest > 150:
            raise RuntimeError("a bug")
        if longest > 100:
            raise EncoderError("an error")
        return super().wait(batch)


def create(model: Model, *, device: str, dtype: str, max_batch_tokens: int | None) -> Encoder:
    return Touchy(model, device=device, dtype=dtype, max_batch_tokens=max_batch_tokens)


def test_no_text_in_logs_and_errors() -> None:
    options = ["--encoder", f"{__name__}:create", "--log-level", "debug"]
    options += ["--max-client-batch-size", "4", "--max-client-batch-tokens", "600", "--payload-limit", "20000"]
    with live(*options, clean_log=False) as server:
        responses = [
            *(server.post("/embed", body) for body in _bodies()),
            *(server.post("/v1/embeddings", {"input": text}) for text in (MARKER, [MARKER, 5], {MARKER: MARKER})),
            server.post("/v1/embeddings", {"input": "a", "model": f"{MARKER} {MARKER}" * 5}),
            server.post("/embed_all", {"inputs": MARKER}),
            server.post("/similarity", {"inputs": {"source_sentence": MARKER, "sentences": [MARKER, 7]}}),
            server.post("/embed", {}, headers={"x-filler": MARKER * 6000}),
            _raw(server, _too_late()),
            _raw(server, f"{MARKER} / HTTP/1.1\r\n\r\n".encode()),
            server.post("/v1/embeddings", {}, headers={"authorization": f"Bearer {MARKER}", "x-request-id": "a"}),
        ]
        for words in (110, 160):
            failed = server.post("/embed", {"inputs": f"{MARKER} " + "word " * words})
            assert failed.status_code == 424
            responses.append(failed)
        seen = {response.status_code for response in responses}
        assert seen >= {200, 400, 413, 422, 424, 431, 503}
        assert any("--max-client-batch-tokens" in response.text for response in responses)
        nowhere = server.post(f"/{MARKER}", {})  # a 404 names the path that was asked for
        assert nowhere.status_code == 404
        assert MARKER not in str(nowhere.headers)
        for response in responses:
            assert MARKER not in response.text, response.text
            assert MARKER not in str(response.headers)
        assert MARKER not in server.get("/metrics").text
        assert "an error" in server.log  # but without the text
        assert MARKER not in server.log


def _bodies() -> Iterator[Any]:
    yield {"inputs": MARKER}
    yield {"inputs": [MARKER, ""]}
    yield {"inputs": [MARKER] * 5}
    yield {"inputs": [f"{MARKER} " + "word " * 90] * 4}
    yield {"inputs": [f"{MARKER} " + "word " * 240] * 4}
    yield {"inputs": MARKER * 2000}
    yield {"inputs": MARKER * 200, "truncate": False}
    yield {"inputs": [MARKER, 1]}
    yield {"inputs": {"text": MARKER}}
    yield {"inputs": MARKER, "prompt_name": f"{MARKER}\n"}
    yield {"inputs": MARKER, "truncation_direction": MARKER}
    yield {"inputs": MARKER, "dimensions": MARKER}
    yield {MARKER: MARKER}
    yield MARKER
    yield [MARKER]


def _too_late() -> bytes:
    """A request that is out of time when it is read: head and body are one packet, so the server need not wait."""
    body = f'{{"inputs": "{MARKER}"}}'
    return (
        f"POST /embed HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx-request-timeout: 0.000001\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()


def _raw(server: Live, data: bytes) -> httpx.Response:
    with connect(server) as sock:
        sock.sendall(data)
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    return httpx.Response(int(head.split()[1]), content=body)
