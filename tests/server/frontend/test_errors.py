"""The errors of one request, in both formats: status, named field and value, and never the text."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.live import Live

CANARY = "canary-7f3a"  # stands in every text sent here, and in no response
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
FIELDS = {"/v1/embeddings": "input", "/embed": "inputs"}
OPENAI, TEI, BOTH = ("/v1/embeddings",), ("/embed",), tuple(FIELDS)
LONG = f"{CANARY} " + "word " * 300

# Value of the input, status, what the message holds; INPUT stands for the field.
INPUTS: list[tuple[Any, int, tuple[str, ...]]] = [
    ([], 400, ("`INPUT`",)),
    ("", 400, ("`INPUT`",)),
    ([CANARY, "", CANARY], 400, ("`INPUT[1]`",)),
    ([[101], []], 400, ("`INPUT[1]`",)),
    (None, 422, ("is null",)),
    (5, 422, ("is 5",)),
    (True, 422, ("is true",)),
    ({CANARY: CANARY}, 422, ("is an object",)),
    ([None], 422, ("`INPUT[0]` is null",)),
    ([{CANARY: CANARY}], 422, ("`INPUT[0]` is an object",)),
    ([1, CANARY], 422, ("`INPUT[1]` is a string of 11 characters",)),
    ([CANARY, 1], 422, ("`INPUT[1]` is 1",)),
    ([[1], [CANARY]], 422, ("`INPUT[1][0]` is a string of 11 characters",)),
    ([1, [2]], 422, ("`INPUT[1]` is a list of 1",)),
    ([[CANARY]], 422, ("`INPUT[0][0]` is a string of 11 characters",)),
    ([[[1]]], 422, ("`INPUT[0][0]` is a list of 1",)),
    ([101, True], 422, ("`INPUT[1]` is true",)),
    ([[101, 5.0]], 422, ("`INPUT[0][1]` is 5.0",)),
    ([101, -1], 422, ("`INPUT`", "token id -1", "0 to 30521")),
    ([[101], [30522]], 422, ("`INPUT`", "token id 30522", "0 to 30521")),
    ([101 + 2**32], 422, ("`INPUT`", "token id 4294967397")),  # 101 in int32
    ([[2**63]], 422, ("`INPUT`", "token id 9223372036854775808")),
    ([10**30], 422, ("`INPUT`", "token id")),
    ([CANARY] * 5000, 413, ("`INPUT`", "5000", "2048")),
    ([[101]] * 2049, 413, ("`INPUT`", "2049", "2048")),
]
# Body, status, the named field (None: the body as a whole), other words of the message, and paths.
BODIES: list[tuple[dict[str, Any] | bytes, int, str | None, tuple[str, ...], tuple[str, ...]]] = [
    ({}, 422, "INPUT", (), BOTH),
    ({"texts": CANARY}, 422, "INPUT", (), BOTH),
    ({"INPUT": LONG, "truncate": False}, 422, "INPUT", ("256", "text 0 has 30"), BOTH),
    ({"INPUT": [CANARY, LONG], "truncate": False}, 422, "INPUT", ("256", "text 1 has 30"), BOTH),
    ({"INPUT": [1] * 257, "truncate": False}, 422, "INPUT", ("257", "256"), BOTH),
    ({"INPUT": f"{CANARY} " * 83_334, "truncate": False}, 422, "INPUT", ("256",), BOTH),
    ({"INPUT": CANARY, "dimensions": 0}, 422, "dimensions", ("1 to 384", "0"), TEI),  # OpenAI's: all, as Infinity
    ({"INPUT": CANARY, "dimensions": 385}, 422, "dimensions", ("1 to 384", "385"), BOTH),
    ({"INPUT": CANARY, "dimensions": 2**70}, 422, "dimensions", ("1180591620717411303424",), BOTH),
    ({"INPUT": CANARY, "dimensions": 1.5}, 422, "dimensions", ("integer", "1.5"), BOTH),
    ({"INPUT": CANARY, "dimensions": True}, 422, "dimensions", ("integer", "true"), BOTH),
    ({"INPUT": CANARY, "normalize": "yes"}, 422, "normalize", ("boolean", "a string of 3"), BOTH),
    ({"INPUT": CANARY, "truncate": 0}, 422, "truncate", ("boolean", "0"), BOTH),
    ({"INPUT": CANARY, "prompt_name": "query"}, 422, "prompt_name", ("'query'",), BOTH),
    ({"INPUT": CANARY, "prompt_name": CANARY * 10}, 422, "prompt_name", ("a string of 110 characters",), BOTH),
    ({"INPUT": [101], "prompt_name": "query"}, 422, "prompt_name", ("ids",), BOTH),
    ({"INPUT": CANARY, "truncation_direction": "up"}, 422, "truncation_direction", ("'right' or 'left'", "'up'"), TEI),
    ({"INPUT": CANARY, "encoding_format": "int8"}, 422, "encoding_format", ("'float' or 'base64'", "'int8'"), OPENAI),
    ({"INPUT": CANARY, "model": 3}, 422, "model", ("string", "3"), OPENAI),
    ({"INPUT": CANARY, "model": "gpt"}, 404, "model", ("all-MiniLM", "'gpt'"), OPENAI),
    ({"INPUT": "a", "model": CANARY * 99}, 404, "model", ("of 1089 char",), OPENAI),
    (b'{"INPUT": [NaN]}', 422, "INPUT", (), BOTH),
    (b'{"INPUT": [101, 1e999]}', 422, "INPUT", (), BOTH),
    (b'{"INPUT": ' + b"[" * 100 + b"]" * 100 + b"}", 422, "INPUT", (), BOTH),
    (b'{"INPUT": "a", "x": ' + b"[" * 8 + b"]" * 8 + b"}", 422, None, ("'x'", "depth of 9", "limit is 8"), BOTH),
    (b'{"INPUT": "a", "x": ' + b'{"a":' * 100 + b"1" + b"}" * 101, 422, None, ("'x'", "depth of 101"), BOTH),
    (b'["canary-7f3a"]', 422, None, ("object", "a list of 1"), BOTH),
    (b'"canary-7f3a"', 422, None, ("object", "a string of 11"), BOTH),
    (b"null", 422, None, ("object", "null"), BOTH),
    (b'{"INPUT": ' + b"[" * 100_000, 413, None, ("100001 lists", "12288", "2048"), BOTH),
    *((json.dumps({"INPUT": CANARY}).encode(encoding), 400, None, ("JSON", "byte order mark", "UTF-8"), BOTH)
      for encoding in ("utf-8-sig", "utf-16")),
    *((body, 400, None, ("JSON",), BOTH) for body in (
        b"", b'{"INPUT": "canary-7f3a', b'{"INPUT": "canary-7f3a"} canary-7f3a', b'{"INPUT": "canary-7f3a",}',
        rb'{"INPUT": "canary-7f3a \ud800"}', b'{"INPUT": "canary-7f3a \xed\xa0\x80"}', b'{"INPUT": "canary-7f3a \xff"}',
        b'{"INPUT": "canary-7f3a\n"}', b'{"INPUT": ' + b"[" * 10_000, b'{"INPUT": ' + b'{"a":' * 10_000,
        b'{"INPUT": [' + b"9" * 5000 + b"]}",
    )),
]  # fmt: skip
CASES = [(path, {"INPUT": value}, status, "INPUT", says) for value, status, says in INPUTS for path in BOTH]
CASES += [(path, body, status, param, says) for body, status, param, says, paths in BODIES for path in paths]  # type: ignore[misc]

VALID = {
    "the last of two equal keys counts": b'{"INPUT": 5, "INPUT": "canary-7f3a"}',
    "seven lists are not too deep": b'{"INPUT": "a", "x": ' + b"[" * 7 + b"]" * 7 + b"}",
    "NUL is a character": rb'{"INPUT": "a\u0000b"}',
    "a space is a text": b'{"INPUT": " "}',
    "a surrogate pair is a character": rb'{"INPUT": "\ud83d\ude00"}',
    "a million characters are cut": b'{"INPUT": "' + b"x" * 1_000_000 + b'"}',
    "null means the default": b'{"INPUT": "a", "truncate": null, "dimensions": null, "prompt_name": null}',
}


def check(response: httpx.Response, status: int, param: str | None, says: tuple[str, ...]) -> None:
    """Status, and type, param and message in the format of the path. `param` is only looked at in OpenAI's."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert CANARY not in response.text
    body = response.json()
    if response.url.path in ("/v1/embeddings", "/embeddings"):
        assert list(body) == ["error"]
        error = body["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert error["code"] == ("model_not_found" if status == 404 else None)
        message = error["message"]
    else:
        assert sorted(body) == ["error", "error_type"]
        assert body["error_type"] == ("Empty" if status == 400 and param else "Validation")
        message = body["error"]
    for piece in (*says, *([f"`{param}"] if param else [])):
        assert piece in message, message
    assert len(message) < 300


def content(body: dict[str, Any] | bytes, field: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return data.replace(b"INPUT", field.encode())


def works(http: httpx.Client) -> bool:
    return http.post("/embed", json={"inputs": [101, 102]}).status_code == 200


@pytest.mark.parametrize(("path", "body", "status", "param", "says"), CASES, ids=lambda each: str(each)[:40])
def test_refused(
    http: httpx.Client, path: str, body: dict[str, Any] | bytes, status: int, param: str | None, says: tuple[str, ...]
) -> None:
    field = FIELDS[path]
    if path in OPENAI and isinstance(body, dict):
        body = {"model": MODEL, **body}
    response = http.post(path, content=content(body, field))
    named = field if param == "INPUT" else param
    check(response, status, named, tuple(piece.replace("INPUT", field) for piece in says))
    assert works(http)


@pytest.mark.parametrize("name", VALID)
@pytest.mark.parametrize("path", BOTH)
def test_not_refused(http: httpx.Client, path: str, name: str) -> None:
    assert http.post(path, content=content(VALID[name], FIELDS[path])).status_code == 200


def chunks(total: int) -> Iterator[bytes]:
    yield b'{"inputs": "'
    for _ in range(total // 100_000):
        yield CANARY.encode() + b"x" * 100_000


@pytest.mark.parametrize("path", BOTH)
def test_a_body_has_a_limit(http: httpx.Client, path: str) -> None:
    limit = ("10000000", "--payload-limit")
    body = b'{"INPUT": "' + CANARY.encode() * 1_000_000 + b'"}'
    check(http.post(path, content=body), 413, None, (*limit, str(len(body))))
    check(http.post(path, content=chunks(11_000_000)), 413, None, limit)  # without a content-length
    assert works(http)
    just_under = json.dumps({FIELDS[path]: "x " * 4_999_990}).encode()
    assert 9_999_900 < len(just_under) <= 10_000_000
    assert http.post(path, content=just_under).status_code == 200


# --- other routes ---

PAIR = {"source_sentence": CANARY, "sentences": [CANARY]}
ROUTES: list[tuple[str, dict[str, Any], int, str | None, tuple[str, ...]]] = [
    ("/embed_all", {"inputs": [CANARY, ""]}, 400, "inputs[1]", ()),
    ("/embed_all", {"inputs": [CANARY, 1]}, 422, "inputs[1]", ("1",)),
    ("/embed_all", {"inputs": LONG, "truncate": False}, 422, "inputs", ("256",)),
    ("/embed_all", {"inputs": [LONG] * 100}, 413, "inputs", ("25600", "2048")),
    ("/similarity", {}, 422, "inputs", ()),
    ("/similarity", {"inputs": CANARY}, 422, "inputs", ("object", "a string of 11")),
    ("/similarity", {"inputs": {"sentences": [CANARY]}}, 422, "inputs.source_sentence", ()),
    ("/similarity", {"inputs": {"source_sentence": CANARY}}, 422, "inputs.sentences", ()),
    ("/similarity", {"inputs": PAIR | {"sentences": CANARY}}, 422, "inputs.sentences", ("a string of 11",)),
    ("/similarity", {"inputs": PAIR | {"sentences": [CANARY, None]}}, 422, "inputs.sentences[1]", ("null",)),
    ("/similarity", {"inputs": PAIR | {"sentences": []}}, 400, "inputs.sentences", ()),
    ("/similarity", {"inputs": PAIR | {"source_sentence": ""}}, 400, "inputs.source_sentence", ()),
    ("/similarity", {"inputs": PAIR | {"sentences": [CANARY, ""]}}, 400, "inputs.sentences[1]", ()),
    ("/similarity", {"inputs": PAIR, "parameters": {"truncate": 3}}, 422, "parameters.truncate", ("3",)),
    ("/similarity", {"inputs": PAIR, "parameters": {"prompt_name": "q"}}, 422, "prompt_name", ("'q'",)),
    ("/similarity", {"inputs": PAIR | {"sentences": [CANARY] * 2048}}, 413, None, ("2049", "2048")),
    ("/tokenize", {"inputs": []}, 400, "inputs", ()),
    ("/tokenize", {"inputs": [CANARY, 1]}, 422, "inputs[1]", ("1",)),
    ("/tokenize", {"inputs": [CANARY] * 2049}, 413, None, ("2049", "2048")),
    ("/tokenize", {"inputs": CANARY, "prompt_name": "q"}, 422, "prompt_name", ("'q'",)),
    ("/decode", {}, 422, "ids", ()),
    ("/decode", {"ids": [[101], []]}, 400, "ids[1]", ()),
    ("/decode", {"ids": [CANARY]}, 422, "ids[0]", ("a string of 11",)),
    ("/decode", {"ids": [1, [2]]}, 422, "ids[1]", ("a list of 1",)),
    ("/decode", {"ids": [[101], [2**40]]}, 422, None, ("sequence 1", "1099511627776")),
    ("/decode", {"ids": [[101]] * 2049}, 413, None, ("2049", "2048")),
    ("/decode", {"ids": [101], "skip_special_tokens": 1}, 422, "skip_special_tokens", ("1",)),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "says"), ROUTES, ids=lambda each: str(each)[:40])
def test_refused_by_other_routes(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str | None, says: tuple[str, ...]
) -> None:
    check(http.post(path, json=body), status, param, says)


@pytest.mark.parametrize("path", ["/embed_all", "/similarity", "/tokenize", "/decode", "/", "/embeddings", "/vertex"])
def test_bodies_that_are_not_json_on_other_routes(http: httpx.Client, path: str) -> None:
    check(http.post(path, content=b'{"canary-7f3a'), 400, None, ("JSON",))
    check(http.post(path, content=b"[]"), 422, None, ("object", "an empty list"))


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("encoding", ["gzip", "gzip, identity", "ünïcode"])
def test_compressed_bodies_are_refused(http: httpx.Client, path: str, encoding: str) -> None:
    body = gzip.compress(content({"INPUT": CANARY}, FIELDS[path]))
    response = http.post(path, content=body, headers={b"content-encoding": encoding.encode("latin-1")})
    check(response, 415, None, ("`Content-Encoding`", "`identity`", f"'{encoding}'"))
    assert response.headers["accept-encoding"] == "identity"
    assert http.post("/embed", json={"inputs": "a"}, headers={"content-encoding": "Identity"}).status_code == 200


# --- routes and methods ---


@pytest.mark.parametrize("path", ["/nothing", "/v1/nothing", "/openai/models", "/static-offline-docs/../gate.py"])
def test_unknown_route(http: httpx.Client, path: str) -> None:
    response = http.post(path)
    assert response.status_code == 404
    if path.startswith(("/v1/", "/openai/")):
        assert response.json()["error"]["type"] == "invalid_request_error"
    else:
        assert response.json()["error_type"] == "Validation"
    assert "/docs" in response.text


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/embed", "POST"), ("OPTIONS", "/embed", "POST"), ("PUT", "/", "GET, POST"),
     ("PUT", "/v1/embeddings", "POST"), ("POST", "/health", "GET"), ("DELETE", "/v1/models", "GET")],
)  # fmt: skip
def test_wrong_method(http: httpx.Client, method: str, path: str, allowed: str) -> None:
    response = http.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    error = response.json()["error"]
    assert method in (error["message"] if path.startswith("/v1/") else error)


def test_the_log_of_all_this_holds_no_text(server: Live, http: httpx.Client) -> None:
    assert works(http)
    assert CANARY not in server.log
    assert "Traceback" not in server.log
