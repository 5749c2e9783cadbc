"""`embert embed --sparse` and `--multi`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from embert.engine import Engine
from tests.server.cli.command import run
from tests.server.models import three_heads

TEXTS = ["a cat", "", "def build(folder):"]


def test_a_line_for_each_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    m3 = str(three_heads(tmp_path / "m3"))
    source, target = tmp_path / "lines", tmp_path / "vectors.jsonl"
    source.write_text("\n".join(TEXTS) + "\n")
    with Engine.load(m3, device="cpu") as engine:
        sparse, multi = engine.embed_sparse(TEXTS), engine.embed_multi(TEXTS)
    command = ("embed", "--quiet", "--device", "cpu", "-m", m3)
    status, out, _ = run(capsys, *command, "--sparse", *TEXTS)
    assert status == 0
    for line, text, vector in zip(map(json.loads, out.splitlines()), TEXTS, sparse, strict=True):
        assert list(line) == ["text", "indices", "values"]
        assert (line["text"], line["indices"]) == (text, vector.indices.tolist())
        assert line["values"] == pytest.approx(vector.values.tolist())
    assert run(capsys, *command, "--multi", "-f", str(source), "-o", str(target))[0] == 0
    for line, text, vectors in zip(map(json.loads, target.read_text().splitlines()), TEXTS, multi, strict=True):
        assert list(line) == ["text", "vectors"]
        assert line["text"] == text
        np.testing.assert_allclose(np.array(line["vectors"]).reshape(vectors.shape), vectors, atol=1e-6)
