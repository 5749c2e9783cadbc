"""`embert rerank`, and what `embert info` says of a classification model."""

from __future__ import annotations

import io
import json
import types
from pathlib import Path

import pytest

from embert.engine import Engine
from tests.server.cli.command import run
from tests.server.models import build_classifier

TEXTS = ["a cat", "a tax form", "", "ünïcode"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_classifier(tmp_path_factory.mktemp("reranker"), "relevance"))


def test_a_line_for_each_text_best_first(capsys: pytest.CaptureFixture[str], reranker: str, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("\r\n".join(TEXTS), encoding="utf-8")
    with Engine.load(reranker, device="cpu") as engine:
        expected = engine.rerank("who purrs?", TEXTS)
    common = ("rerank", reranker, "--query", "who purrs?", "--file", str(tmp_path / "lines"), "--device", "cpu", "-q")
    status, out, _ = run(capsys, *common)
    lines = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [line["index"] for line in lines] == [each.index for each in expected]
    assert [line["score"] for line in lines] == pytest.approx([each.score for each in expected])
    assert all(set(line) == {"index", "score"} for line in lines)
    _, out, _ = run(capsys, *common, "--top-n", "2", "--return-text", "--raw")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["text"] for line in lines] == [TEXTS[each.index] for each in expected[:2]]
    assert lines[0]["score"] > lines[1]["score"]


def test_texts_come_from_standard_input(
    capsys: pytest.CaptureFixture[str], reranker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(b"a cat\na tax form\n")))
    status, out, _ = run(capsys, "rerank", reranker, "--query", "who", "--device", "cpu", "-q")
    assert (status, len(out.splitlines())) == (0, 2)


def test_what_is_wrong_is_said(capsys: pytest.CaptureFixture[str], reranker: str, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"fine\n\xff\n")
    for arguments, message in (
        (("--file", str(tmp_path / "lines")), "lines line 2 is not UTF-8: byte 0xff at position 1"),
        (("--file", str(tmp_path / "none")), "none: no such file or directory"),
        (("--file", "/dev/null", "--top-n", "0"), "--top-n must be at least 1, found 0"),
    ):
        status, out, err = run(capsys, "rerank", reranker, "--query", "who", "--device", "cpu", "-q", *arguments)
        assert (status, out) == (1, "")
        assert message in err
    options = ("--query", "who", "--file", str(tmp_path / "lines"), "--column", "body")
    status, _, err = run(capsys, "rerank", reranker, *options)
    assert (status, "--column goes with" in err) == (2, True)
    status, _, err = run(capsys, "rerank", reranker)
    assert status == 2
    assert "--query" in err


def test_info_says_tasks_and_labels(capsys: pytest.CaptureFixture[str], reranker: str) -> None:
    _, out, _ = run(capsys, "info", reranker, "--json", "--device", "cpu")
    facts = json.loads(out)
    assert (facts["tasks"], facts["labels"], facts["scores"]) == (["classify", "rerank"], ["relevance"], "sigmoid")
    assert (facts["pooling"], facts["dimensions"]) == (None, None)
    _, out, _ = run(capsys, "info", reranker, "--json", "--device", "cpu", "--pooling", "mean")
    facts = json.loads(out)
    assert facts["tasks"] == ["embed", "tokens", "classify", "rerank"]
    assert (facts["pooling"], facts["dimensions"]) == ("mean", 32)
    _, out, _ = run(capsys, "info", "--json", "--device", "cpu")
    facts = json.loads(out)
    assert (facts["tasks"], facts["labels"]) == (["embed", "tokens"], None)
