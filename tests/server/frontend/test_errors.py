"""The errors of one request, in both dialects, each with everything it must and must not say."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.server.live import Live

CANARY = "canary-7f3a"  # stands in every text sent here, and in no answer
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
FORMS = {
    "input": "a string, a list of strings, a list of token ids, or a list of such lists",
    "inputs": "a string, a list of token ids, or a list of strings and of such lists",
}
ERROR_FORMATS = {"/v1/embeddings": "input", "/embed": "inputs"}


@dataclass(frozen=True)
class Case:
    """A request that is refused. INPUT stands for the dialect's field."""

    name: str
    body: dict[str, Any] | bytes
    status: int
    says: tuple[str, ...]  # the message holds all of these
    param: str | None = "INPUT"
    type: str = "Validation"  # TEI's
    paths: tuple[str, ...] = tuple(ERROR_FORMATS)


def empty(name: str, value: Any, says: str) -> Case:
    return Case(name, {"INPUT": value}, 400, (says,), type="Empty")


def wrong(name: str, value: Any, found: str) -> Case:
    return Case(name, {"INPUT": value}, 422, ("`INPUT`", "FORMS", found))


def bad_id(name: str, value: Any, given: str) -> Case:
    return Case(name, {"INPUT": value}, 422, ("`INPUT`", f"token id {given};", "0 to 30521"))


def field(name: str, value: Any, *says: str, paths: tuple[str, ...] = tuple(ERROR_FORMATS)) -> Case:
    shown = str(value)[:20]
    return Case(f"{name}={shown}", {"INPUT": CANARY, name: value}, 422, (f"`{name}`", *says), param=name, paths=paths)


def not_json(name: str, body: bytes, *says: str) -> Case:
    return Case(name, body, 400, ("the request body is not valid JSON", *says), param=None)


def not_object(name: str, body: bytes, found: str) -> Case:
    return Case(name, body, 422, ("the request body must be a JSON object", found), param=None)


OPENAI, TEI = ("/v1/embeddings",), ("/embed",)
LONG = f"{CANARY} " + "word " * 300

CASES = [
    empty("empty list", [], "`INPUT` must not be an empty list"),
    empty("empty string", "", "`INPUT` must not be empty"),
    empty("list of an empty string", [""], "`INPUT` must not be empty"),
    empty("an empty string among others", [CANARY, "", CANARY], "`INPUT[1]` must not be empty"),
    empty("list of an empty list", [[]], "`INPUT` must not be empty"),
    empty("an empty list among others", [[101], []], "`INPUT[1]` must not be empty"),
    Case("no input", {}, 422, ("`INPUT` is required",)),
    Case("another field only", {"texts": CANARY}, 422, ("`INPUT` is required",)),
    wrong("null", None, "`INPUT` is null"),
    wrong("list of null", [None], "`INPUT[0]` is null"),
    wrong("integer", 5, "`INPUT` is 5"),
    wrong("float", 1.5, "`INPUT` is 1.5"),
    wrong("boolean", True, "`INPUT` is true"),
    wrong("object", {CANARY: CANARY}, "`INPUT` is an object"),
    wrong("list of objects", [{CANARY: CANARY}], "`INPUT[0]` is an object"),
    wrong("id, then text", [1, CANARY], "`INPUT[1]` is a string of 11 characters"),
    wrong("text, then id", [CANARY, 1], "`INPUT[1]` is 1"),
    wrong("text, then null", [CANARY, None], "`INPUT[1]` is null"),
    wrong("ids, then texts", [[1], [CANARY]], "`INPUT[1][0]` is a string of 11 characters"),
    wrong("id, then ids", [1, [2]], "`INPUT[1]` is a list of 1"),
    wrong("texts in a list too many", [[CANARY]], "`INPUT[0][0]` is a string of 11 characters"),
    wrong("ids in a list too many", [[[1]]], "`INPUT[0][0]` is a list of 1"),
    wrong("boolean as id", [101, True], "`INPUT[1]` is true"),
    wrong("float as id", [101, 5.5], "`INPUT[1]` is 5.5"),
    wrong("whole float as id", [[101, 5.0]], "`INPUT[0][1]` is 5.0"),
    bad_id("negative id", [101, -1], "-1"),
    bad_id("id past the vocabulary", [101, 30522], "30522"),
    bad_id("id past the vocabulary in the second list", [[101], [30522]], "30522"),
    bad_id("id past int32", [101, 2**31], "2147483648"),
    bad_id("id that is 101 in int32", [101 + 2**32], "4294967397"),
    bad_id("id past int64", [[2**63]], "9223372036854775808"),
    bad_id("id of thirty digits", [10**30], "out of all bounds"),
    Case("5000 texts", {"INPUT": [CANARY] * 5000}, 413, ("`INPUT`", "5000 texts", "limit is 2048")),
    Case("2049 lists of ids", {"INPUT": [[101]] * 2049}, 413, ("`INPUT`", "2049 texts", "limit is 2048")),
    Case("too long", {"INPUT": LONG, "truncate": False}, 422, ("`INPUT`", "the limit is 256", "text 0 has 30")),
    Case(
        "too long among others",
        {"INPUT": [CANARY, LONG], "truncate": False},
        422,
        ("`INPUT`", "the limit is 256", "text 1 has 30"),
    ),
    Case("too many ids", {"INPUT": [1] * 257, "truncate": False}, 422, ("`INPUT`", "257", "the limit is 256")),
    Case(
        "a million characters, not to be cut",
        {"INPUT": f"{CANARY} " * 83_334, "truncate": False},
        422,
        ("`INPUT`", "the limit is 256", "tokens"),
    ),
    field("dimensions", 0, "1 to 384", "it is 0", paths=TEI),  # OpenAI's routes: as Infinity, all of them
    field("dimensions", -3, "1 to 384", "it is -3"),
    field("dimensions", 385, "1 to 384", "it is 385"),
    field("dimensions", 2**70, "1 to 384", "it is 1180591620717411303424"),
    field("dimensions", 1.5, "integer", "it is 1.5"),
    field("dimensions", "5", "integer", "it is a string of 1 characters"),
    field("dimensions", True, "integer", "it is true"),
    field("dimensions", [5], "integer", "it is a list of 1"),
    field("normalize", "yes", "boolean", "it is a string of 3 characters"),
    field("normalize", 1, "boolean", "it is 1"),
    field("truncate", "no", "boolean", "it is a string of 2 characters"),
    field("truncate", 0, "boolean", "it is 0"),
    field("prompt_name", "query", "prompts (none)", "it is 'query'"),
    field("prompt_name", CANARY * 10, "prompts (none)", "it is a string of 110 characters"),
    field("prompt_name", 3, "string", "it is 3"),
    field("truncation_direction", "up", "'right' or 'left'", "it is 'up'", paths=TEI),
    field("truncation_direction", CANARY, "'right' or 'left'", "it is a string of 11 characters", paths=TEI),
    field("encoding_format", "int8", "'float' or 'base64'", "it is 'int8'", paths=OPENAI),
    field("encoding_format", 8, "'float' or 'base64'", "it is 8", paths=OPENAI),
    field("model", 3, "string", "it is 3", paths=OPENAI),
    Case("prompt for ids", {"INPUT": [101], "prompt_name": "query"}, 422, ("`prompt_name`", "ids"), "prompt_name"),
    Case(
        "unknown model",
        {"INPUT": CANARY, "model": "gpt"},
        404,
        ("`model`", "all-MiniLM", "'gpt'"),
        "model",
        paths=OPENAI,
    ),
    Case("model without a name", {"INPUT": CANARY, "model": ""}, 404, ("`model`", "it is ''"), "model", paths=OPENAI),
    Case("model named by a text", {"INPUT": "a", "model": CANARY * 99}, 404, ("of 1089 char",), "model", paths=OPENAI),
    not_json("no body", b""),
    not_json("half an object", b"{"),
    not_json("half a text", b'{"INPUT": "canary-7f3a'),
    not_json("Python's quotes", b"{'INPUT': 'canary-7f3a'}"),
    not_json("more after it", b'{"INPUT": "canary-7f3a"} canary-7f3a'),
    not_json("a form", b"INPUT=canary-7f3a"),
    not_json("a comma too many", b'{"INPUT": "canary-7f3a",}'),
    not_json("byte order mark", b'\xef\xbb\xbf{"INPUT": "canary-7f3a"}'),
    not_json("UTF-16", json.dumps({"INPUT": CANARY}).encode("utf-16")),
    not_json("lone high surrogate, escaped", rb'{"INPUT": "canary-7f3a \ud800"}', "surrogate"),
    not_json("lone low surrogate, escaped", rb'{"INPUT": "canary-7f3a \udc00 "}', "surrogate"),
    not_json("surrogate as bytes", b'{"INPUT": "canary-7f3a \xed\xa0\x80"}', "unicode"),
    not_json("not UTF-8", b'{"INPUT": "canary-7f3a \xff"}', "unicode"),
    not_json("a newline in a text", b'{"INPUT": "canary-7f3a\n"}'),
    not_json("nested without end", b'{"INPUT": ' + b"[" * 100_000, "recursion"),
    not_json("objects without end", b'{"INPUT": ' + b'{"a":' * 10_000, "recursion"),
    not_json("a number of 5000 digits", b'{"INPUT": [' + b"9" * 5000 + b"]}"),
    Case("nested deeply", b'{"INPUT": ' + b"[" * 100 + b"]" * 100 + b"}", 422, ("`INPUT`", "FORMS")),
    Case("not a number", b'{"INPUT": [NaN]}', 422, ("`INPUT`", "FORMS")),
    Case("infinity", b'{"INPUT": [101, 1e999]}', 422, ("`INPUT`", "FORMS")),
    not_object("a list", b'["canary-7f3a"]', "it is a list of 1"),
    not_object("a text", b'"canary-7f3a"', "it is a string of 11 characters"),
    not_object("a number", b"5", "it is 5"),
    not_object("null", b"null", "it is null"),
]

NOT_WRONG = [
    ("the last of two equal keys counts", b'{"INPUT": 5, "INPUT": "canary-7f3a"}'),
    ("unknown fields are ignored", b'{"INPUT": "canary-7f3a", "later": [{}]}'),
    ("NUL is a character", rb'{"INPUT": "a\u0000b"}'),
    ("a space is a text", b'{"INPUT": " "}'),
    ("a surrogate pair is a character", rb'{"INPUT": "\ud83d\ude00"}'),
    ("a million characters are cut", b'{"INPUT": "' + b"x " * 500_000 + b'"}'),
    ("and a million without a space", b'{"INPUT": "' + b"x" * 1_000_000 + b'"}'),
    ("null means the default", b'{"INPUT": "a", "truncate": null, "dimensions": null, "prompt_name": null}'),
]


def openai_type(status: int) -> str:
    return "invalid_request_error" if status < 424 else "server_error"


def check(answer: httpx.Response, path: str, case: Case, field: str) -> None:
    """Status, type, param and message of the dialect that `path` speaks."""
    assert answer.status_code == case.status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert CANARY not in answer.text
    body = answer.json()
    if path in ("/v1/embeddings", "/embeddings"):
        assert list(body) == ["error"]
        error = body["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        assert error["type"] == openai_type(case.status)
        assert error["param"] == (field if case.param == "INPUT" else case.param)
        assert error["code"] == ("model_not_found" if case.status == 404 else None)
        message = error["message"]
    else:
        assert sorted(body) == ["error", "error_type"]
        assert body["error_type"] == case.type
        message = body["error"]
    for piece in case.says:
        assert piece.replace("INPUT", field).replace("FORMS", FORMS.get(field, "")) in message, message
    assert len(message) < 300


def content(body: dict[str, Any] | bytes, field: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return data.replace(b"INPUT", field.encode())


def works(http: httpx.Client) -> bool:
    return http.post("/embed", json={"inputs": [101, 102]}).status_code == 200


@pytest.mark.parametrize(
    ("path", "case"),
    [pytest.param(path, case, id=f"{path}-{case.name}") for case in CASES for path in case.paths],
)
def test_refused(http: httpx.Client, path: str, case: Case) -> None:
    field = ERROR_FORMATS[path]
    body = {"model": MODEL, **case.body} if path in OPENAI and isinstance(case.body, dict) else case.body
    answer = http.post(path, content=content(body, field))
    check(answer, path, case, field)
    assert works(http)


@pytest.mark.parametrize(("name", "body"), NOT_WRONG, ids=[name for name, _ in NOT_WRONG])
@pytest.mark.parametrize("path", ERROR_FORMATS)
def test_not_refused(http: httpx.Client, path: str, name: str, body: bytes) -> None:
    answer = http.post(path, content=content(body, ERROR_FORMATS[path]))
    assert answer.status_code == 200, answer.text


def pieces(total: int) -> Iterator[bytes]:
    yield b'{"inputs": "'
    for _ in range(total // 100_000):
        yield CANARY.encode() + b"x" * 100_000


@pytest.mark.parametrize("path", ERROR_FORMATS)
def test_ten_megabytes(http: httpx.Client, path: str) -> None:
    said = Case("", {}, 413, ("10000000", "--payload-limit", "bytes"), param=None)
    body = b'{"INPUT": "' + CANARY.encode() * 1_000_000 + b'"}'
    told_in_advance = http.post(path, content=body)
    check(told_in_advance, path, said, "")
    assert str(len(body)) in told_in_advance.text
    check(http.post(path, content=pieces(11_000_000)), path, said, "")  # chunked: no content-length
    assert works(http)


def test_just_under_the_payload_limit(http: httpx.Client) -> None:
    body = json.dumps({"inputs": "x " * 4_999_993}).encode()
    assert 9_999_900 < len(body) <= 10_000_000
    assert http.post("/embed", content=body).status_code == 200


# --- the other routes, with the sentences of their own ---

ROUTES: list[tuple[str, dict[str, Any], int, str, tuple[str, ...]]] = [
    ("/embed_all", {"inputs": []}, 400, "Empty", ("`inputs` must not be an empty list",)),
    ("/embed_all", {"inputs": [CANARY, ""]}, 400, "Empty", ("`inputs[1]` must not be empty",)),
    ("/embed_all", {"inputs": [CANARY, 1]}, 422, "Validation", ("`inputs[1]` is 1", "FORMS")),
    ("/embed_all", {"inputs": LONG, "truncate": False}, 422, "Validation", ("`inputs`", "limit is 256")),
    ("/embed_all", {"inputs": [LONG] * 100}, 413, "Validation", ("`inputs` has 25600 tokens", "token vectors is 2048")),
    ("/embed_all", {"inputs": CANARY, "prompt_name": "q"}, 422, "Validation", ("`prompt_name`", "it is 'q'")),
    ("/similarity", {}, 422, "Validation", ("`inputs` is required",)),
    ("/similarity", {"inputs": CANARY}, 422, "Validation", ("`inputs` must be an object", "a string of 11")),
    ("/similarity", {"inputs": {"sentences": [CANARY]}}, 422, "Validation", ("`inputs.source_sentence` is required",)),
    ("/similarity", {"inputs": {"source_sentence": CANARY}}, 422, "Validation", ("`inputs.sentences` is required",)),
    (
        "/similarity",
        {"inputs": {"source_sentence": CANARY, "sentences": CANARY}},
        422,
        "Validation",
        ("`inputs.sentences`", "a string of 11 characters"),
    ),
    (
        "/similarity",
        {"inputs": {"source_sentence": CANARY, "sentences": [CANARY, None]}},
        422,
        "Validation",
        ("`inputs.sentences[1]`", "null"),
    ),
    (
        "/similarity",
        {"inputs": {"source_sentence": CANARY, "sentences": []}},
        400,
        "Empty",
        ("`inputs.sentences` must not be an empty list",),
    ),
    (
        "/similarity",
        {"inputs": {"source_sentence": "", "sentences": [CANARY]}},
        400,
        "Empty",
        ("`inputs.source_sentence` must not be empty",),
    ),
    (
        "/similarity",
        {"inputs": {"source_sentence": CANARY, "sentences": [CANARY, ""]}},
        400,
        "Empty",
        ("`inputs.sentences[1]` must not be empty",),
    ),
    (
        "/similarity",
        {"inputs": {"source_sentence": CANARY, "sentences": [CANARY]}, "parameters": {"truncate": 3}},
        422,
        "Validation",
        ("`parameters.truncate`", "it is 3"),
    ),
    (
        "/similarity",
        {"inputs": {"source_sentence": CANARY, "sentences": [CANARY]}, "parameters": {"prompt_name": "q"}},
        422,
        "Validation",
        ("`prompt_name`", "it is 'q'"),
    ),
    (
        "/similarity",
        {"inputs": {"source_sentence": CANARY, "sentences": [CANARY] * 2048}},
        413,
        "Validation",
        ("2049 texts", "limit is 2048"),
    ),
    ("/tokenize", {"inputs": []}, 400, "Empty", ("`inputs` must not be an empty list",)),
    ("/tokenize", {"inputs": [CANARY, 1]}, 422, "Validation", ("a string or a list of strings", "`inputs[1]` is 1")),
    ("/tokenize", {"inputs": [CANARY] * 2049}, 413, "Validation", ("2049 texts", "limit is 2048")),
    ("/tokenize", {"inputs": CANARY, "prompt_name": "q"}, 422, "Validation", ("`prompt_name`", "it is 'q'")),
    ("/tokenize", {"inputs": CANARY, "add_special_tokens": 1}, 422, "Validation", ("`add_special_tokens`", "it is 1")),
    ("/decode", {}, 422, "Validation", ("`ids` is required",)),
    ("/decode", {"ids": []}, 400, "Empty", ("`ids` must not be an empty list",)),
    ("/decode", {"ids": [[101], []]}, 400, "Empty", ("`ids[1]` must not be empty",)),
    ("/decode", {"ids": CANARY}, 422, "Validation", ("a list of token ids", "a string of 11 characters")),
    ("/decode", {"ids": [CANARY]}, 422, "Validation", ("a list of token ids", "`ids[0]` is a string of 11")),
    ("/decode", {"ids": [True]}, 422, "Validation", ("`ids[0]` is true",)),
    ("/decode", {"ids": [1, [2]]}, 422, "Validation", ("`ids[1]` is a list of 1",)),
    ("/decode", {"ids": [-1]}, 422, "Validation", ("token id -1;", "0 to 30521")),
    ("/decode", {"ids": [[101], [2**40]]}, 422, "Validation", ("sequence 1", "token id 1099511627776;")),
    ("/decode", {"ids": [[101]] * 2049}, 413, "Validation", ("2049 texts", "limit is 2048")),
    ("/decode", {"ids": [101], "skip_special_tokens": 1}, 422, "Validation", ("`skip_special_tokens`", "it is 1")),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "type_", "says"), ROUTES, ids=[f"{row[0]}-{str(row[1])[:60]}" for row in ROUTES]
)
def test_refused_by_other_routes(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, type_: str, says: tuple[str, ...]
) -> None:
    check(http.post(path, json=body), path, Case("", body, status, says, type=type_), "inputs")
    assert works(http)


@pytest.mark.parametrize("path", ["/embed_all", "/similarity", "/tokenize", "/decode", "/", "/embeddings", "/vertex"])
def test_bodies_that_are_not_json_on_other_routes(http: httpx.Client, path: str) -> None:
    check(http.post(path, content=b'{"canary-7f3a'), path, not_json("", b""), "")
    check(http.post(path, content=b"[]"), path, not_object("", b"", "it is an empty list"), "")


@pytest.mark.parametrize("path", ERROR_FORMATS)
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, identity", "ünïcode"])
def test_compressed_bodies_are_refused(http: httpx.Client, path: str, encoding: str) -> None:
    body = gzip.compress(content({"INPUT": CANARY}, ERROR_FORMATS[path]))
    answer = http.post(path, content=body, headers={b"content-encoding": encoding.encode("latin-1")})
    case = Case("", b"", 415, ("`Content-Encoding`", "`identity`", f"it is '{encoding}'"), param=None)
    check(answer, path, case, "")
    assert answer.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
def test_bodies_that_say_that_they_are_not_compressed(http: httpx.Client, encoding: str) -> None:
    assert http.post("/embed", json={"inputs": "a"}, headers={"content-encoding": encoding}).status_code == 200


def test_accept_has_weights(http: httpx.Client) -> None:
    for accept, wanted in (
        ("application/octet-stream", "application/octet-stream"),
        ("application/octet-stream;q=0", "application/json"),
        ("application/octet-stream;q=0.5, application/json", "application/json"),
        ("image/png", "application/json"),
    ):
        answer = http.post("/embed", json={"inputs": "a"}, headers={"accept": accept})
        assert (answer.status_code, answer.headers["content-type"]) == (200, wanted)


# --- routes and methods ---


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/nothing"), ("POST", "/nothing"), ("POST", "/v1/nothing"), ("POST", "/openai/models"),
     ("DELETE", "/v1"), ("GET", "/static-offline-docs/../gate.py")],
)  # fmt: skip
def test_unknown_route(http: httpx.Client, method: str, path: str) -> None:
    answer = http.request(method, path)
    assert answer.status_code == 404
    if path.startswith(("/v1/", "/openai/")):
        assert answer.json()["error"]["type"] == "invalid_request_error"
    else:
        assert answer.json()["error_type"] == "Validation"
    assert "/docs" in answer.text


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/embed", "POST"), ("PUT", "/", "GET, POST"), ("PUT", "/v1/embeddings", "POST"),
     ("POST", "/health", "GET"), ("DELETE", "/v1/models", "GET"), ("POST", "/metrics", "GET"),
     ("PATCH", "/info", "GET")],
)  # fmt: skip
def test_wrong_method(http: httpx.Client, method: str, path: str, allowed: str) -> None:
    answer = http.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed
    error = answer.json()["error"]
    assert method in (error["message"] if path.startswith("/v1/") else error)


def test_the_log_of_all_this_holds_no_text(server: Live, http: httpx.Client) -> None:
    assert works(http)
    assert CANARY not in server.log
    assert "Traceback" not in server.log
