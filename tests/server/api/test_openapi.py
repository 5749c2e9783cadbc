"""The OpenAPI document, and schemathesis over all of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from embert.engine.tasks import task_names
from embert.server.api.routes import DIALECTS, TASKS
from embert.server.api.service import TEI_NAME
from embert.server.http.errors import Dialect
from tests.server.live import STAND_IN, Live, live


@pytest.fixture(scope="module")
def small(three_heads_folder: Path) -> Iterator[Live]:
    """A server whose largest requests are small, since boundary values are sent."""
    with live(str(three_heads_folder), *STAND_IN, "--max-client-batch-size", "16") as running:
        yield running


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/openapi.json").json()
    return found


def test_schemathesis(small: Live, tmp_path: Path) -> None:
    """Examples, boundary values and random bodies: no 5xx, and every answer as the document has it.

    One check is left out: to JSON Schema 473.0 is an integer, and a token id it is not.
    """
    (tmp_path / "schemathesis.toml").write_text('[checks]\nnegative_data_rejection.expected-statuses = ["4xx"]\n')
    ended = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", "run", f"{small.url}/openapi.json", "--checks", "all",
            "--phases", "examples,coverage,fuzzing", "--max-examples", "30", "--generation-deterministic",
            "--suppress-health-check", "all", "--warnings", "off", "--exclude-checks", "positive_data_acceptance",
            "--request-timeout", "30", "--continue-on-failure", "--no-color",
        ],
        cwd=tmp_path,  # it reads its configuration and writes caches there
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    operations = sum(map(len, small.get("/openapi.json").json()["paths"].values()))
    assert f"{operations} selected / {operations} total" in ended.stdout
    assert small.get("/health").status_code == 200


def test_the_document_states_the_models_bounds(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["EmbeddingsRequest"]["properties"]
    assert fields["dimensions"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 384}
    text, texts, ids, lists = fields["input"]["anyOf"]
    assert text == {"type": "string", "minLength": 1}
    assert (texts["minItems"], texts["maxItems"]) == (1, 2048)
    assert ids["items"] == {"type": "integer", "minimum": 0, "maximum": 30521}
    assert "maxItems" not in ids  # one text, which is cut
    assert lists["maxItems"] == 2048


def test_every_operation_says_what_its_errors_are(document: dict[str, Any]) -> None:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert operation["summary"]
            for status, response in operation["responses"].items():
                content = response.get("content", {})
                assert content, (method, path, status)
                if status[0] == "4":
                    name = "OpenAIError" if DIALECTS[path] is Dialect.OPENAI else "TeiError"
                    assert content == {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def test_ids_of_operations_are_unique(document: dict[str, Any]) -> None:
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids))


def test_examples_work(small: Live) -> None:
    paths = small.get("/openapi.json").json()["paths"]
    has = small.get("/info").json()["tasks"]
    for task in TASKS:
        for path in task.paths:
            example = paths[path]["post"]["requestBody"]["content"]["application/json"]["example"]
            answer = small.post(path.replace("{name}", TEI_NAME), example)
            expected = 200 if {*task_names(task.needs)} <= {*has} else 424 if task.dialect is Dialect.TEI else 400
            assert answer.status_code == expected, (path, answer.text)
