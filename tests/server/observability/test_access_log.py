"""The access log: a line for each request, and in it neither a text nor a key."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embert.server.observability.access_log import AccessLog
from embert.server.observability.request_record import RequestRecord
from embert.server.protocols.request_context import LatencyBreakdown
from tests.server.live import STAND_IN, Live, live, until
from tests.server.stand_in import FAIL

CANARY = "canary-8d2f"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
KEYS = f"""\
# the keys of this test
key-without-a-name-{CANARY}

# name: search-team
# which may be followed by another comment
name:with:colons-{CANARY}
# name: two words are no name
another {CANARY}=key
"""
OF_SEARCH, NAMELESS, SPACED = f"name:with:colons-{CANARY}", f"key-without-a-name-{CANARY}", f"another {CANARY}=key"
OPTION = f"from-an-option-{CANARY}"


@pytest.fixture(scope="module")
def logging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEYS)
    options = ["--access-log", "json", "--log-level", "error", "--served-model-name", "mini"]
    options += ["--api-key", OPTION, "--api-key-file", str(keys)]
    with live(*STAND_IN, *options, clean_log=False) as running:
        yield running


def line_of(server: Live, request_id: str) -> dict[str, Any]:
    """The only line about this request."""

    def found() -> list[dict[str, Any]]:
        return [json.loads(line) for line in server.log.splitlines() if f'"{request_id}"' in line]

    (line,) = until(found, what=f"the line of {request_id}")
    return line


def ask(
    server: Live, request_id: str, body: Any, key: str | None = OF_SEARCH, path: str = "/embed", **more: str
) -> int:
    headers = {b"x-request-id": request_id.encode(), **{name.encode(): value.encode() for name, value in more.items()}}
    if key is not None:
        headers[b"authorization"] = b"Bearer " + key.encode()
    with server.client() as client:
        return client.post(path, json=body, headers=headers).status_code


def test_a_line_says_all_of_a_request(logging: Live) -> None:
    headers = {"x-priority": "bulk", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    assert ask(logging, "whole", {"inputs": [f"{CANARY} text"] * 3}, **headers) == 200
    line = line_of(logging, "whole")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line.pop("pid") in logging.http_pids
    assert re.fullmatch(r"127\.0\.0\.1:\d+", line.pop("peer"))
    assert line.pop("tokens") > 3 * 3
    parts = [line.pop(f"{part}_ms") for part in ("tokenize", "queue", "inference", "encode")]
    assert 0 < sum(parts) <= line.pop("ms") + 0.004  # each is rounded
    assert min(parts) > 0
    assert line == {
        "level": "info",
        "process": "http-0",
        "message": "request",
        "status": 200,
        "route": "/embed",
        "model": "mini",
        "priority": "bulk",
        "request_id": "whole",
        "trace_id": TRACE,
        "key": "search-team",
    }


@pytest.mark.parametrize(
    ("key", "name", "status"),
    [(OF_SEARCH, "search-team", 200), (NAMELESS, "file-1", 200), (SPACED, "file-3", 200), (OPTION, "option-1", 200),
     ("wrong", "", 401), (None, "", 401), ("search-team", "", 401)],
)  # fmt: skip
def test_keys_have_names(logging: Live, key: str | None, name: str, status: int) -> None:
    request_id = f"key-{name}-{key is None}-{key == 'wrong'}"
    assert ask(logging, request_id, {"inputs": "a"}, key) == status
    line = line_of(logging, request_id)
    assert (line["status"], line["key"]) == (status, name)
    assert line["model"] == ("mini" if status == 200 else "")


def test_what_fails_has_a_line_too(logging: Live) -> None:
    assert ask(logging, "failed", {"inputs": [101, FAIL, 102]}) == 424
    assert ask(logging, "empty", {"inputs": ""}) == 400
    assert ask(logging, "nowhere", {}, path=f"/{CANARY}") == 404
    assert {name: line_of(logging, name)["status"] for name in ("failed", "empty", "nowhere")} == {
        "failed": 424,
        "empty": 400,
        "nowhere": 404,
    }
    assert line_of(logging, "nowhere")["route"] == "other"
    assert line_of(logging, "failed")["tokens"] == 3


def test_bytes_that_are_not_a_request_have_a_line_too(logging: Live) -> None:
    with socket.create_connection(("127.0.0.1", logging.ports[0])) as connection:
        connection.sendall(f"{CANARY}\r\n\r\n".encode())
        assert b" 400 " in connection.recv(1000)
        host, port = connection.getsockname()
    line = until(
        lambda: [json.loads(line) for line in logging.log.splitlines() if f'"{host}:{port}"' in line],
        what="the line of the bytes",
    )[0]
    assert (line["status"], line["route"], line["request_id"]) == (400, "other", "-")


def test_no_text_and_no_key_is_in_it(logging: Live) -> None:
    ask(logging, "last", {"inputs": [f"{CANARY} once more"]})
    line_of(logging, "last")
    assert len(logging.log.splitlines()) > 10
    assert CANARY not in logging.log


def test_off_says_nothing(server: Live) -> None:
    assert server.post("/embed", {"inputs": "a"}, headers={"x-request-id": "unlogged"}).status_code == 200
    assert "unlogged" not in server.log


def test_without_traces_no_process_has_opentelemetrys_sdk(server: Live) -> None:
    for pid in server.pids:
        # The extension of protobuf, which the exporter needs. FastAPI alone imports OpenTelemetry's API.
        assert "/google/_upb/" not in Path(f"/proc/{pid}/maps").read_text()


def test_text_is_one_line() -> None:
    lines: list[bytes] = []
    parts = LatencyBreakdown(tokenize_s=0.001, queue_s=0.002, inference_s=0.003, encode_s=0.004, tokens=4)
    record = RequestRecord("/embed", b"mine", b"", "interactive", "mini", 200, parts=parts)
    AccessLog("text", "http-0", lines.append).note(record, 0.5, ("127.0.0.1", 80))
    assert re.fullmatch(
        rb"\d\d:\d\d:\d\d\.\d{3} INFO    http-0     200 /embed model=mini priority=interactive tokens=4 ms=500\.000"
        rb" tokenize=1\.000 queue=2\.000 inference=3\.000 encode=4\.000 id=mine key=- peer=127\.0\.0\.1:80\n",
        lines[0],
    )


@pytest.mark.parametrize(("client", "peer"), [(None, ""), (("10.0.0.1", 80), "10.0.0.1:80"), (("::1", 80), "[::1]:80")])
def test_peers(client: tuple[str, int] | None, peer: str) -> None:
    lines: list[bytes] = []
    AccessLog("json", "http-0", lines.append).note(RequestRecord("/livez", b"x"), 0.001, client)
    assert json.loads(lines[0])["peer"] == peer
