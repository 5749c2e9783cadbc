"""The stage of Ray Data as a plain object: Arrow tables in, Arrow tables out, and every error. No cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from embert import Engine
from tests.server.models import build_classifier, late_interaction, three_heads

pa = pytest.importorskip("pyarrow", reason="pyarrow is of the extra ray")
pytest.importorskip("ray", reason="ray is an extra")

if TYPE_CHECKING:
    from embert.ray import Embedder

TEXTS = ["a cat", "a much longer text about a cat that sat on a mat", "", "größer 大"]
TOLERANCE = 1e-6  # the CPU encoder rounds by what a text is batched with


def embedder(*arguments: Any, **options: Any) -> Embedder:
    from embert.ray import Embedder

    return Embedder(*arguments, **options)


def table(texts: Sequence[str | None] = TEXTS, **columns: Any) -> Any:
    return pa.table({"text": pa.array(texts, pa.string()), "id": range(len(texts))} | columns)


@pytest.fixture(scope="module")
def minilm() -> Embedder:
    return embedder()


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return three_heads(tmp_path_factory.mktemp("m3"))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_classifier(tmp_path_factory.mktemp("classifier"), "good", "bad")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_classifier(tmp_path_factory.mktemp("reranker"), "relevance")


def rows(column: Any) -> Any:
    return np.array(column.to_pylist(), np.float32)


# --- tasks ---


def test_vectors_are_the_engines(minilm: Embedder) -> None:
    with Engine.load(device="cpu") as engine:
        wanted = engine.embed(TEXTS)
    made = minilm(table())
    assert made.column_names == ["text", "id", "embedding"]
    assert made.select(["text", "id"]).equals(table())
    assert made.schema.field("embedding").type == pa.list_(pa.float32(), 384)
    np.testing.assert_allclose(rows(made["embedding"]), wanted, atol=TOLERANCE)


def test_options_are_the_engines() -> None:
    made = embedder(
        column="body", output_column="short", dimensions=64, normalize=False, dtype="bfloat16", device="cpu"
    )
    with Engine.load(device="cpu", dtype="bfloat16") as engine:
        wanted = engine.embed(TEXTS, dimensions=64, normalize=False)
    found = made(pa.table({"body": TEXTS}))["short"]
    assert found.type == pa.list_(pa.float32(), 64)
    np.testing.assert_allclose(rows(found), wanted, atol=0.02)


@pytest.mark.parametrize("rows_", [0, 1])
def test_any_number_of_rows(minilm: Embedder, rows_: int) -> None:
    made = minilm(table(TEXTS[:rows_]))
    assert made.num_rows == rows_
    assert made.schema.field("embedding").type == pa.list_(pa.float32(), 384)


@pytest.mark.parametrize("kind", ["string", "large_string", "string_view", "dictionary"])
def test_every_kind_of_string(minilm: Embedder, kind: str) -> None:
    plain = pa.array(TEXTS)
    column = plain.dictionary_encode() if kind == "dictionary" else plain.cast(getattr(pa, kind)())
    chunks = pa.chunked_array([column.slice(0, 1), column.slice(1)])
    found = rows(minilm(pa.table({"text": chunks}))["embedding"])
    np.testing.assert_allclose(found, rows(minilm(table())["embedding"]), atol=TOLERANCE)


def test_sparse_vectors(m3: Path) -> None:
    made = embedder(str(m3), task="sparse")(table())["sparse"]
    with Engine.load(str(m3), device="cpu") as engine:
        wanted = engine.embed_sparse(TEXTS)
    assert made.type == pa.struct([("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float32()))])
    for found, vector in zip(made.to_pylist(), wanted, strict=True):
        assert found["indices"] == vector.indices.tolist()
        np.testing.assert_allclose(found["values"], vector.values, atol=TOLERANCE)


@pytest.mark.parametrize("is_query", [False, True])
def test_multi_vectors(tmp_path: Path, is_query: bool) -> None:
    folder = late_interaction(tmp_path)
    made = embedder(str(folder), task="multi", is_query=is_query)(table())["vectors"]
    with Engine.load(str(folder), device="cpu") as engine:
        wanted = engine.embed_multi(TEXTS, is_query=is_query)
    assert made.type == pa.list_(pa.list_(pa.float32(), wanted[0].shape[1]))
    assert [len(row) for row in made.to_pylist()] == [len(row) for row in wanted]
    for found, vectors in zip(made.to_pylist(), wanted, strict=True):
        np.testing.assert_allclose(np.array(found, np.float32), vectors, atol=TOLERANCE)


def test_scores_of_pairs(reranker: Path) -> None:
    pairs = pa.table({"query": ["a", "b", "c", "d"], "text": TEXTS})
    made = embedder(str(reranker), task="score", column=("query", "text"), raw=True)(pairs)["score"]
    with Engine.load(str(reranker), device="cpu") as engine:
        wanted = engine.score(list(zip("abcd", TEXTS, strict=True)), raw=True)
    assert made.type == pa.float32()
    np.testing.assert_allclose(made.to_pylist(), wanted, atol=1e-5)


def test_classes(classifier: Path) -> None:
    made = embedder(str(classifier), task="classify")(table())["classes"]
    with Engine.load(str(classifier), device="cpu") as engine:
        wanted = engine.classify(TEXTS)
    found = [[each["label"] for each in row] for row in made.to_pylist()]
    assert found == [[each.label for each in row] for row in wanted]
    assert all(row[0]["score"] >= row[1]["score"] for row in made.to_pylist())


# --- errors ---


def test_a_null_is_named(minilm: Embedder) -> None:
    with pytest.raises(ValueError, match=r"'text'.* 2 .* 3"):
        minilm(table(["a", "b", None]))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"body": ["a"]}, "there is no column 'text'; the columns are 'body'"),
        ({"text": [1]}, "column 'text' holds int64, not strings"),
        ({"text": [b"a"]}, "column 'text' holds binary, not strings"),
        ({"text": ["a"], "embedding": [1]}, "there is a column 'embedding' already; choose another `output_column`"),
    ],
)
def test_columns_that_do_not_do(minilm: Embedder, batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        minilm(pa.table(batch))


def test_a_batch_of_another_format(minilm: Embedder) -> None:
    with pytest.raises(Exception, match=r"dict.*pyarrow"):
        minilm({"text": np.array(["a"])})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "rank"}, "`task` must be one of embed, sparse, multi, score, classify; it is 'rank'"),
        ({"task": "sparse"}, "does not have the task sparse; it has embed, tokens"),
        (
            {"task": "sparse", "dimensions": 64},
            "`dimensions` is not an option of the task sparse; its options are device,",
        ),
        ({"batch_size": 64}, "`batch_size` is not an option of the task embed"),
        ({"dimensions": 1000}, "`dimensions` must be from 1 to 384, found 1000"),
        ({"prompt_name": "query"}, "`prompt_name` 'query' is not known"),
        ({"instruction": "Find."}, "`instruction` is not read by this model"),
        ({"task": "score"}, "the task score reads 2 columns; `column` names text"),
        ({"column": ("a", "b")}, "the task embed reads 1 columns; `column` names a, b"),
        ({"model": "./no-such-folder"}, r"no such folder: \./no-such-folder"),
        ({"device": "cuda", "encoder": "torch"}, "the torch encoder does not run on device cuda"),
    ],
)
def test_options_that_do_not_do(options: dict[str, Any], message: str) -> None:
    from embert.ray.errors import EmbedderError

    with pytest.raises(EmbedderError, match=message):
        embedder(**options)


def test_a_text_that_is_too_long() -> None:
    from embert.ray.errors import EmbedderError

    strict = embedder(truncate=False)
    with pytest.raises(EmbedderError, match="`texts`: text 1 has"):
        strict(table(["short", "long " * 1000]))


def test_without_ray_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None; import embert.ray; embert.ray.Embedder"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "embert.ray.Embedder needs ray: pip install 'embert[ray]'" in ran.stderr
