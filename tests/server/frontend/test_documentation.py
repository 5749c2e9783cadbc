"""The reference documentation says what is there, all of it, and nothing else."""

from __future__ import annotations

import argparse
import base64
import dataclasses
import json
import re
import shlex
import typing
from typing import Any, cast
from urllib.parse import urljoin

import httpx
import numpy as np
import pytest

from embert.engine import Task
from embert.server.cli.main import _parser
from embert.server.config import ServeConfig, environment_name, option_name
from embert.server.frontend.routes import METRIC_ROUTES, ROUTES, TASKS, TaskRoute
from embert.server.request.request_body import RequestBody
from tests.server.live import ROOT, Live

API = (ROOT / "docs" / "api.md").read_text()
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()

# --- configuration.md ---


OPTION = re.compile(r"^\| `(MODEL|--[\w-]+)` \| `(EMBERT_\w+)` \| (.+?) \| (.+?) \|$", re.MULTILINE)


def shown(value: Any) -> str | None:
    """A default as the table shows it, or None when it is words."""
    match value:
        case None | ():
            return None
        case bool():
            return "`true`" if value else "`false`"
        case tuple():
            return "`" + ",".join(item if isinstance(item, str) else f"{item:g}" for item in value) + "`"
        case float():
            return f"`{value:g}`"
        case _:
            return f"`{value}`"


def test_every_option_is_documented_and_no_other() -> None:
    rows = {name: cells for name, *cells in OPTION.findall(CONFIGURATION)}
    options = {
        "MODEL" if option.metadata.get("positional") else option_name(option.name): option
        for option in dataclasses.fields(ServeConfig)
    }
    assert sorted(rows) == sorted(options)
    for name, option in options.items():
        variable, default, meaning = rows[name]
        assert variable == environment_name(option.name)
        expected = shown(option.default)
        assert default == expected if expected else "`" not in default, name
        for choice in option.metadata.get("choices", ()):
            assert f"`{choice}`" in meaning


@pytest.mark.parametrize("command", ["embed", "rerank", "classify", "entities", "info"])
def test_options_of_the_other_commands_are_documented(command: str) -> None:
    table = CONFIGURATION.partition("# The other commands")[2]
    rows = re.findall(r"^\| (`--.+?) \| ([\w, ]+) \|", table, re.MULTILINE)
    documented = {
        name for names, commands in rows if command in commands for name in re.findall(r"`(--[\w-]+)`", names)
    }
    (commands,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    actual = {name for action in commands.choices[command]._actions for name in action.option_strings}
    assert documented == {name for name in actual if name.startswith("--")} - {"--help"}


# --- api.md ---


def test_every_route_is_documented_and_no_other(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    served = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    # Not in the document.
    served |= {("GET", path) for path in ("/ping", "/docs", "/openapi.json")}
    assert set(re.findall(r"`(GET|POST) (/[^`\s]*)`", API)) == served
    assert served == {(route.method, path) for route in ROUTES for path in route.paths}
    assert {path for _, path in served} | {"other"} == set(METRIC_ROUTES)


def server_for(request: pytest.FixtureRequest, path: str, command: str = "") -> Live:
    """A server whose model has the task of a route."""
    row = next((row for row in TASKS if path in row.paths), None)
    if row is not None and (row.entails or row.decides or row.needs == Task.TOKEN_CLASSES):
        return cast("Live", request.getfixturevalue("tagger" if row.needs == Task.TOKEN_CLASSES else "nli"))
    if row is not None and (row.reranks or row.needs == Task.CLASSIFY):
        return cast("Live", request.getfixturevalue("reranker" if row.reranks else "classifier"))
    several = row is not None and (row.needs == Task.SPARSE or not command or "sparse" in command)
    return cast("Live", request.getfixturevalue("three_heads" if several else "server"))


def body_fields(body: type[RequestBody]) -> set[str]:
    """The fields of a body and of the objects in it."""
    fields = set(body.model_fields)
    for field in body.model_fields.values():
        for inner in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, RequestBody):
                fields |= body_fields(inner)
    return fields


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.path)
def test_every_field_is_documented(task: TaskRoute) -> None:
    assert f"### `{task.name}`" in API
    assert {
        field for field in body_fields(task.request) if f"`{field}`" not in API and f'"{field}"' not in API
    } == set()


EXAMPLE = re.compile(r"```sh\n(curl .+?)\n```\n```json\n(.+?)\n```", re.DOTALL)


def run_example(http: httpx.Client, command: str) -> httpx.Response:
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == "curl"
    path = words[1].removeprefix("localhost:8080")
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert set(options) <= {"-H", "-d"}
    if "-d" not in options:
        return http.get(path)
    name, _, value = options["-H"].partition(": ")
    return http.post(path, content=options["-d"], headers={name: value})


def alike(found: Any, expected: Any) -> bool:
    """Equal. Floats may differ a little, and facts of this machine need only be there."""
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and list(found) == list(expected)
            and all(name in LOCAL or alike(found[name], expected[name]) for name in expected)
        )
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(alike, found, expected))
    if isinstance(expected, str) and BASE64.fullmatch(expected):
        return alike(*(np.frombuffer(base64.b64decode(each), "<f4").tolist() for each in (found, expected)))
    if isinstance(expected, str) and RANDOM.search(expected):
        return isinstance(found, str) and RANDOM.sub("", found) == RANDOM.sub("", expected)
    if isinstance(expected, float):
        return isinstance(found, float) and abs(found - expected) < 2e-3
    return bool(found == expected)


BASE64 = re.compile("[A-Za-z0-9+/]{16}")  # 3 numbers
RANDOM = re.compile("[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}")  # of a UUID
LOCAL = {"created", "device", "device_name", "backend", "backend_choice", "model_dtype", "last_success_age_s",
         "tokenization_workers", "max_batch_tokens", "max_queue_tokens", "queue_limit_tokens",
         "max_concurrent_requests", "total_duration"}  # fmt: skip


@pytest.mark.parametrize(("command", "expected"), EXAMPLE.findall(API), ids=lambda text: text[:60])
def test_examples(request: pytest.FixtureRequest, command: str, expected: str) -> None:
    path = command.split()[1].removeprefix("localhost:8080")
    with server_for(request, path, command).client() as client:
        response = run_example(client, command)
    if "…" in expected:
        assert response.status_code == 200
        return
    assert alike(response.json(), json.loads(expected)), response.text


def test_headers_are_documented(http: httpx.Client) -> None:
    raw = {"accept": "application/octet-stream"}
    several = {"input": "a", "model": "text-embeddings-inference", "color": 1}
    responses = [
        http.post("/embed", json={"inputs": "a"}, headers=raw),
        http.post("/embed_all", json={"inputs": "a " * 300}, headers=raw),
        http.post("/pooling", json=several),
    ]
    sent = {name for response in responses for name in response.headers} - {"date", "content-type", "content-length"}
    documented = set(re.findall(r"^\| `([a-z-]+)` \| [^|]+ \|$", API.partition("## Headers")[2], re.MULTILINE))
    assert sent == documented


# --- /docs without internet ---


def test_docs_load_nothing_from_elsewhere(http: httpx.Client) -> None:
    """A proxy may serve the server below /embert/, which it strips."""
    page = http.get("/docs").text
    urls = re.findall(r"""(?:src|href)=["']([^"']+)""", page) + re.findall(r"""url:\s*["']([^"']+)""", page)
    assert len(urls) >= 3
    for url in urls:
        prefix, path = urljoin("http://proxy/embert/docs", url).split("/embert")
        assert prefix == "http://proxy"
        response = http.get(path)
        assert response.status_code == 200
        assert len(response.content) > 100
    assert "//cdn" not in page
    assert http.get("/redoc").status_code == 404
    (place,) = http.get("/openapi.json").json()["servers"]
    assert urljoin("http://proxy/embert/openapi.json", place["url"]) == "http://proxy/embert/"
