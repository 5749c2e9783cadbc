"""`embert embed --sparse` and `--multi`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from embert.engine import Engine
from tests.server.cli import command
from tests.server.models import three_heads

TEXTS = ["a cat", "", "def build(folder):"]


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(three_heads(tmp_path_factory.mktemp("m3")))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return command.run(capsys, "embed", "--quiet", "--device", "cpu", *arguments)


def test_a_line_for_each_text(capsys: pytest.CaptureFixture[str], m3: str, tmp_path: Path) -> None:
    source, target = tmp_path / "lines", tmp_path / "vectors.jsonl"
    source.write_text("\n".join(TEXTS) + "\n")
    with Engine.load(m3, device="cpu") as engine:
        sparse, multi = engine.embed_sparse(TEXTS), engine.embed_multi(TEXTS)
    status, out, _ = run(capsys, "-m", m3, "--sparse", *TEXTS)
    assert status == 0
    for line, text, vector in zip(map(json.loads, out.splitlines()), TEXTS, sparse, strict=True):
        assert list(line) == ["text", "indices", "values"]
        assert (line["text"], line["indices"]) == (text, vector.indices.tolist())
        assert line["values"] == pytest.approx(vector.values.tolist())
    assert run(capsys, "-m", m3, "--multi", "-f", str(source), "-o", str(target))[0] == 0
    for line, text, vectors in zip(map(json.loads, target.read_text().splitlines()), TEXTS, multi, strict=True):
        assert list(line) == ["text", "vectors"]
        assert line["text"] == text
        np.testing.assert_allclose(np.array(line["vectors"]).reshape(vectors.shape), vectors, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--sparse", "--multi"), 2, "not allowed with"),
        (("--queries",), 2, "--queries goes with --multi"),
        (("--sparse", "--dimensions", "8"), 2, "--sparse goes without --dimensions and --no-normalize"),
        (("--multi", "--no-normalize"), 2, "--multi goes without --dimensions and --no-normalize"),
        (("--sparse", "-o", "x.npy"), 2, "--sparse writes JSON lines or Parquet: an array x.npy cannot hold"),
        (("--sparse",), 1, "does not have the task sparse; it has embed, tokens"),
        (("--multi",), 1, "does not have the task multi_vector; it has embed, tokens"),
    ],
)
def test_what_is_wrong_is_said(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, said: str
) -> None:
    found, out, err = run(capsys, *arguments, "a")
    assert (found, out) == (status, "")
    assert said in err
    assert "Traceback" not in err
