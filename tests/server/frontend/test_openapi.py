"""The OpenAPI document, and schemathesis over all of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from embert.engine import Task
from embert.server.frontend.routes import SHARED_PATHS, TASKS, error_formats_by_path
from embert.server.http.errors import ErrorFormat
from tests.server.live import STAND_IN, Live, live
from tests.server.models import build_classifier

ERROR_FORMATS = error_formats_by_path()
ERRORS = {ErrorFormat.OPENAI: "OpenAIError", ErrorFormat.TEI: "TeiError", ErrorFormat.COHERE: "CohereError"}


@pytest.fixture(scope="module")
def small(three_heads_folder: Path) -> Iterator[Live]:
    """A server whose largest requests are small, since boundary values are sent."""
    with live(str(three_heads_folder), *STAND_IN, "--max-client-batch-size", "16") as running:
        yield running


@pytest.fixture(scope="module")
def small_reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Like `small`, for scores, classes and vectors."""
    folder = build_classifier(tmp_path_factory.mktemp("reranker"), "relevance")
    limits = ("--max-client-batch-size", "16", "--max-client-documents", "16")
    with live(str(folder), "--pooling", "mean", *STAND_IN, *limits) as running:
        yield running


@pytest.fixture(scope="module")
def small_nli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Like `small`, for zero-shot classes."""
    folder = build_classifier(tmp_path_factory.mktemp("nli"), "entailment", "neutral", "contradiction")
    with live(str(folder), *STAND_IN, "--max-client-batch-size", "16", "--max-client-documents", "64") as running:
        yield running


@pytest.fixture(scope="module")
def small_tagger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Like `small`, for entities."""
    folder = build_classifier(tmp_path_factory.mktemp("tagger"), "O", "B-PER", "I-PER", tokens=True)
    with live(str(folder), *STAND_IN, "--max-client-batch-size", "16") as running:
        yield running


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/openapi.json").json()
    return found


# Importing it takes longer than most of its runs.
SCHEMATHESIS = """
import json, os, sys
from schemathesis.cli import schemathesis
for arguments in json.loads(sys.argv[1]):
    if os.fork() == 0:
        schemathesis.main(arguments)
    assert os.wait()[1] == 0
"""


@pytest.mark.timeout(900)
def test_schemathesis(small: Live, small_reranker: Live, small_nli: Live, small_tagger: Live, tmp_path: Path) -> None:
    """Examples, boundary values and random bodies: no 5xx, and every response as the document has it.

    Of all routes on a model of vectors, those included that it cannot response; then of those that need other models.
    Without one check: to JSON Schema 473.0 is an integer, and a token id it is not.
    """
    operations = sum(map(len, small.get("/openapi.json").json()["paths"].values()))
    scores = [path for row in TASKS if row.needs == Task.CLASSIFY for path in row.paths if path not in SHARED_PATHS]
    runs: list[tuple[Live, list[str], int]] = [
        (small, [".*"], operations),
        (small_reranker, scores, len(scores)),
        (small_nli, ["/zero_shot", "/invocations"], 2),
        (small_tagger, ["/token_classify", "/pooling", "/invocations"], 3),
    ]
    options = [
        "--checks", "all", "--phases", "examples,coverage,fuzzing", "--max-examples", "3", "--generation-deterministic",
        "--suppress-health-check", "all", "--warnings", "off", "--exclude-checks", "positive_data_acceptance",
        "--request-timeout", "30", "--continue-on-failure", "--no-color",
    ]  # fmt: skip
    arguments = [
        ["run", f"{server.url}/openapi.json", *options, "--include-path-regex", f"^({'|'.join(paths)})$"]
        for server, paths, _ in runs
    ]
    (tmp_path / "schemathesis.toml").write_text('[checks]\nnegative_data_rejection.expected-statuses = ["4xx"]\n')
    ended = subprocess.run(
        [sys.executable, "-c", SCHEMATHESIS, json.dumps(arguments)],
        cwd=tmp_path,  # it reads its configuration and writes caches there
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert [int(selected) for selected in re.findall(r"(\d+) selected / ", ended.stdout)] == [each for *_, each in runs]
    assert all(server.get("/health").status_code == 200 for server, *_ in runs)


def test_the_document_states_the_models_bounds(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    fields = schemas["EmbeddingsRequest"]["properties"]
    assert fields["dimensions"]["anyOf"][0] == {"type": "integer", "minimum": 0, "maximum": 384}
    text, texts, ids, lists = fields["input"]["anyOf"]
    assert text == {"type": "string", "minLength": 1}
    assert (texts["minItems"], texts["maxItems"], lists["maxItems"]) == (1, 2048, 2048)
    assert ids["items"] == {"type": "integer", "minimum": 0, "maximum": 30521}
    assert "maxItems" not in ids  # one text, which is cut
    documents = schemas["RerankDocumentsRequest"]["properties"]["documents"]
    assert (documents["minItems"], documents["maxItems"]) == (1, 10_000)
    text, pair, several = schemas["PredictRequest"]["properties"]["inputs"]["anyOf"]
    assert (text["minLength"], pair["minItems"], pair["maxItems"]) == (1, 1, 2)
    assert (several["minItems"], several["maxItems"], several["items"]["maxItems"]) == (1, 2048, 2)
    assert document["paths"]["/v1/rerank"]["post"]["x-task-missing"]
    assert "x-task-missing" not in document["paths"]["/embed"]["post"]


def test_every_operation_says_what_its_errors_are(document: dict[str, Any]) -> None:
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids))
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert operation["summary"]
            for status, response in operation["responses"].items():
                content = response.get("content", {})
                assert content, (method, path, status)
                if status[0] == "4":
                    name = ERRORS[ERROR_FORMATS[path]]
                    assert content == {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def test_examples_work(
    small: Live, small_reranker: Live, splade: Live, late_interaction: Live, small_nli: Live, small_tagger: Live
) -> None:
    served_paths = set()
    for server in (small, small_reranker, splade, late_interaction, small_nli, small_tagger):
        for path, item in server.get("/openapi.json").json()["paths"].items():
            if "post" not in item:
                continue
            operation = item["post"]
            example = operation["requestBody"]["content"]["application/json"]["example"]
            response = server.post(path.replace("{name}", "text-embeddings-inference"), example)
            missing = 424 if ERROR_FORMATS[path] is ErrorFormat.TEI else 400
            assert response.status_code == (missing if operation.get("x-task-missing") else 200), (path, response.text)
            served_paths |= {path} if response.status_code == 200 else set()
    assert served_paths == {path for row in TASKS for path in row.paths}
