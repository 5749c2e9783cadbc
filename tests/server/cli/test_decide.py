"""`embert decide`: requests of a file in the forms of both APIs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embert.engine import Engine, Question
from tests.oracles.pipelines import NLI, write
from tests.server.cli.command import run

STATE = "Angela met Merkel in New York"
OPENAI = {"input": STATE, "questions": [{"type": "predicate", "name": "met", "instructions": "they met"}]}
TYPESAFE = {
    "state": STATE,
    "questions": {"far": {"type": "score", "instructions": "how?", "criteria": ["near", "far"]}},
}


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write(tmp_path_factory.mktemp("nli"), "uncased", "bert", "ForSequenceClassification", NLI))


def test_a_line_for_each_request(capsys: pytest.CaptureFixture[str], nli: str, tmp_path: Path) -> None:
    with Engine.load(nli, device="cpu") as engine:
        met, far = engine.decide(STATE, [Question.predicate("they met"), Question.score("how?", ["near", "far"])])
    path = tmp_path / "requests"
    for content in (json.dumps([OPENAI, TYPESAFE], indent=1), f"{json.dumps(OPENAI)}\n\n{json.dumps(TYPESAFE)}\n"):
        path.write_text(content)
        status, out, _ = run(capsys, "decide", nli, str(path), "--device", "cpu", "-q")
        first, second = map(json.loads, out.splitlines())
        assert status == 0
        assert first == {"answers": [{"type": "predicate", "name": "met", "probability": met.probabilities[0]}]}
        assert second["answers"]["far"]["score"] == far.score


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps([OPENAI, {**OPENAI, "questions": []}]), "request 1: `questions`"),
        (json.dumps({"input": STATE}), "request 0: `questions` is required"),
        ("{}\n{", "line 2 is not JSON"),
    ],
)
def test_refused_requests(
    capsys: pytest.CaptureFixture[str], nli: str, tmp_path: Path, content: str, words: str
) -> None:
    (tmp_path / "requests").write_text(content)
    status, _, err = run(capsys, "decide", nli, str(tmp_path / "requests"), "--device", "cpu", "-q")
    assert status == 1
    assert words in err
