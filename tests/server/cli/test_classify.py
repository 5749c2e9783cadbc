"""`embert classify` and `embert entities` on files, compared with the Python API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from embert.engine import Engine
from tests.oracles.pipelines import LABELS, NLI, random_texts, write
from tests.server.cli import command

TEXTS = [text.replace("\t", " ") for text in random_texts(12)]


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("nli"), "uncased", "bert", "ForSequenceClassification", NLI))


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("tagger"), "cased", "bert", "ForTokenClassification", LABELS))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[Any], str]:
    status, out, err = command.run(capsys, *arguments, "--device", "cpu", "-q")
    return status, [json.loads(line) for line in out.splitlines()], err


def test_labels_of_lines_and_of_tables(capsys: pytest.CaptureFixture[str], nli: str, tmp_path: Path) -> None:
    lines, table = tmp_path / "lines.txt", tmp_path / "rows.jsonl"
    lines.write_text("\n".join(TEXTS), encoding="utf-8")
    table.write_text("".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(TEXTS)))
    with Engine.load(nli, device="cpu") as engine:
        own, labeled = engine.classify(TEXTS), engine.zero_shot(TEXTS, ["a", "b"], multi_label=True)
    status, rows, _ = run(capsys, "classify", nli, "--file", str(lines))
    assert (status, [row["text"] for row in rows]) == (0, TEXTS)
    options = ("--column", "body", "--keep-all", "--label", "a", "--label", "b", "--multi-label")
    _, more, _ = run(capsys, "classify", nli, "--file", str(table), *options)
    assert [(row["id"], row["body"]) for row in more] == list(enumerate(TEXTS))
    for found, expected in ((rows, own), (more, labeled)):
        for row, labels in zip(found, expected, strict=True):
            assert [each["label"] for each in row["labels"]] == [each.label for each in labels]
            assert [each["score"] for each in row["labels"]] == pytest.approx([each.score for each in labels], abs=1e-5)


def test_entities_of_parquet(capsys: pytest.CaptureFixture[str], tagger: str, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "texts.parquet")
    with Engine.load(tagger, device="cpu") as engine:
        expected = engine.entities(TEXTS, stride=5, aggregation_strategy="first", ignore_labels=["PER"])
    options = ("--stride", "5", "--aggregation-strategy", "first", "--ignore-label", "PER")
    status, rows, _ = run(capsys, "entities", tagger, "--file", str(tmp_path / "texts.parquet"), *options)
    assert (status, len(rows)) == (0, len(TEXTS))
    for row, entities in zip(rows, expected, strict=True):
        assert [(each["label"], each["word"], each["start"], each["end"]) for each in row["entities"]] == [
            (each.label, each.word, each.start, each.end) for each in entities
        ]


def test_what_is_wrong_is_said(capsys: pytest.CaptureFixture[str], nli: str, tagger: str, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("fine\n" + "word " * 100 + "\n")
    (tmp_path / "broken").write_bytes(b"fine\n\xff\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "labels": 1}\n')
    lines = ("--file", str(tmp_path / "lines"))
    for arguments, status, message in (
        (("classify", nli, *lines, "--no-truncate"), 1, "lines line 2 has 102 tokens, the limit is 48"),
        (("entities", tagger, *lines, "--no-truncate"), 1, "lines line 2 has more than 48 tokens"),
        (("entities", tagger, "--file", str(tmp_path / "broken")), 1, "broken line 2 is not UTF-8"),
        (("entities", tagger, *lines, "--stride", "46"), 1, "--stride must be from 0 to 45"),
        (("entities", nli, *lines), 1, "does not have the task token_classify"),
        (("classify", tagger, *lines), 1, "does not have the task classify"),
        (("classify", nli, *lines, "--label", "a", "--hypothesis-template", "a"), 1, "--hypothesis-template"),
        (("classify", nli, "--file", str(tmp_path / "rows.jsonl"), "--keep-all"), 1, "'labels'"),
        (("classify", nli, *lines, "--label", "a", "--raw"), 2, "--raw goes without --label"),
        (("classify", nli, *lines, "--column", "body"), 2, "--column goes with JSON lines"),
        (("classify", nli, *lines, "--multi-label"), 2, "--multi-label goes with --label"),
        (("classify", nli, *lines, "--hypothesis-template", "{}"), 2, "--hypothesis-template goes with --label"),
        (("classify", nli), 2, "--file"),
    ):
        ended, _, err = run(capsys, *arguments)
        assert (ended, message in err) == (status, True), (arguments, err)
