"""The OpenAPI document, and schemathesis over all of it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from embert.server.frontend.routes import TASKS, error_formats_by_path
from embert.server.http.errors import ErrorFormat
from tests.server.live import STAND_IN, Live, live
from tests.server.models import build_classifier

ERROR_FORMATS = error_formats_by_path()
ERRORS = {
    ErrorFormat.OPENAI: "OpenAIError",
    ErrorFormat.TEI: "TeiError",
    ErrorFormat.COHERE: "CohereError",
    ErrorFormat.OLLAMA: "OllamaError",
    ErrorFormat.TYPESAFE: "TypeSafeError",
}


@pytest.fixture(scope="module")
def small(three_heads_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of vectors, scores, zero-shot classes and entities. Its largest requests are small."""
    labels = {
        "reranker": ("relevance",),
        "nli": ("entailment", "neutral", "contradiction"),
        "tagger": ("O", "B-PER", "I-PER"),
    }
    models = [f"heads={three_heads_folder}"]
    for name, names in labels.items():
        folder = build_classifier(tmp_path_factory.mktemp(name), *names, tokens=name == "tagger")
        models.append(f"{name}={folder}")
    limits = ("--max-client-batch-size", "16", "--max-client-documents", "64")
    with live(*models, *STAND_IN, *limits) as running:
        yield running


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/openapi.json").json()
    return found


@pytest.mark.timeout(900)
def test_schemathesis(small: Live, tmp_path: Path) -> None:
    """Examples and boundary values: no 5xx, and every response as the document has it. Random bodies: tests.fuzz.

    Without one check: to JSON Schema 473.0 is an integer, and a token id it is not.
    """
    options = [
        "--checks", "all", "--phases", "examples,coverage", "--generation-deterministic",
        "--suppress-health-check", "all", "--warnings", "off", "--exclude-checks", "positive_data_acceptance",
        "--request-timeout", "60", "--max-response-time", "60", "--continue-on-failure", "--no-color",
    ]  # fmt: skip
    (tmp_path / "schemathesis.toml").write_text('[checks]\nnegative_data_rejection.expected-statuses = ["4xx"]\n')
    command = "from schemathesis.cli import schemathesis; schemathesis()"
    ended = subprocess.run(
        [sys.executable, "-c", command, "run", f"{small.url}/openapi.json", *options],
        cwd=tmp_path,  # it reads its configuration and writes caches there
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    operations = sum(map(len, small.get("/openapi.json").json()["paths"].values()))
    assert re.findall(r"(\d+) selected / ", ended.stdout) == [str(operations)]
    assert small.get("/health").status_code == 200


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


def test_examples_work(small: Live, server: Live, splade: Live, late_interaction: Live) -> None:
    served_paths = set()
    for running in (small, server, splade, late_interaction):
        for path, item in running.get("/openapi.json").json()["paths"].items():
            if "post" not in item:
                continue
            operation = item["post"]
            example = operation["requestBody"]["content"]["application/json"]["example"]
            response = running.post(path.replace("{name}", "text-embeddings-inference"), example)
            decides = path in ("/v1/decisions", "/v1/systemone", "/v1/decide")
            missing = 424 if decides or ERROR_FORMATS[path] is ErrorFormat.TEI else 400
            assert response.status_code == (missing if operation.get("x-task-missing") else 200), (path, response.text)
            served_paths |= {path} if response.status_code == 200 else set()
    assert served_paths == {path for row in TASKS for path in row.paths}
