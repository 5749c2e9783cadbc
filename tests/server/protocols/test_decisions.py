"""/v1/decisions and /v1/systemone: responses in both forms, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embert import engine
from embert.engine import Question
from tests.engine.test_decisions import QWEN_TEMPLATE, language_model
from tests.engine.test_decoders import qwen
from tests.server.live import Live, live
from tests.server.protocols.oracle import model_folder
from tests.server.refusals import check_refused

STATE = "Angela met Merkel in New York"
PREDICATE = {"type": "predicate", "name": "met", "instructions": "they met"}
CHOICE = {
    "type": "choice",
    "instructions": "true?",
    "choices": [{"value": True, "description": "it is"}, {"value": "true"}, {"value": "in"}],
}
SCORE = {"type": "score", "instructions": "how far?", "levels": [{"label": "near"}, {"label": "far"}]}
NOUL = {"type": "noul", "instructions": "they met"}


def near(expected: Any) -> Any:
    """Compare with figures of this process, whose kernels another test may have chosen for another instruction set."""
    return pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_openais_form(nli: Live) -> None:
    body = {"input": STATE, "questions": [PREDICATE, CHOICE, SCORE], "safety_identifier": "someone"}
    response = nli.post("/v1/decisions", body)
    predicate, choice, score = response.json()["answers"]
    with engine.Engine.load(model_folder(nli), device="cpu") as loaded:
        questions = [
            Question.predicate("they met"),
            Question("choice", "true?", (engine.Option("true", "it is"), engine.Option("true"), engine.Option("in"))),
            Question.score("how far?", ["near", "far"]),
        ]
        expected = loaded.decide(STATE, questions)
    assert predicate == {"type": "predicate", "name": "met", "probability": near(expected[0].probabilities[0])}
    values = [True, "true", "in"]
    assert [each["value"] for each in choice["probabilities"]] == values
    assert [each["probability"] for each in choice["probabilities"]] == near([*expected[1].probabilities])
    assert (choice["choice"], choice["name"]) == (values[expected[1].index], None)
    assert (score["score"], score["confidence"]) == near((expected[2].score, expected[2].confidence))
    assert [(each["value"], each["label"]) for each in score["probabilities"]] == [(0, "near"), (1, "far")]
    usage = response.json()["usage"]
    assert usage["input_tokens"] == usage["total_tokens"] == int(response.headers["x-compute-tokens"])


def test_input_of_messages_is_their_text(nli: Live) -> None:
    parts = [{"type": "input_text", "text": "Angela met"}, {"type": "input_json", "data": {"in": "York"}}]
    messages = [{"role": "user", "content": parts}, {"role": "user", "type": "message", "content": "Merkel"}]
    told = nli.post("/v1/decisions", {"input": messages, "questions": [PREDICATE]}).json()
    text = 'Angela met\n\n{"in": "York"}\n\nMerkel'
    assert told["answers"] == nli.post("/v1/decisions", {"input": text, "questions": [PREDICATE]}).json()["answers"]


@pytest.mark.parametrize("path", ["/v1/systemone", "/v1/decide"])
def test_typesafes_form(nli: Live, path: str) -> None:
    questions = {
        "met": NOUL,
        "place": {"type": "choice", "instructions": "where?", "criteria": {"York": "a town", "in": None}},
        "far": {"type": "score", "instructions": "how far?", "criteria": ["near", {"km": 5}]},
    }
    body = nli.post(path, {"state": {"text": STATE}, "questions": questions}).json()
    assert body.keys() == {"model", "answers", "usage"}
    assert body["usage"]["output_tokens"] == 0
    met, place, far = (body["answers"][name] for name in questions)
    state = f'{{"text": "{STATE}"}}'
    asked = [
        PREDICATE,
        {
            "type": "choice",
            "instructions": "where?",
            "choices": [{"value": "York", "description": "a town"}, {"value": "in"}],
        },
        {"type": "score", "instructions": "how far?", "levels": [{"label": "near"}, {"label": '{"km": 5}'}]},
    ]
    same = nli.post("/v1/decisions", {"input": state, "questions": asked}).json()["answers"]
    assert met == {"type": "noul", "noul": same[0]["probability"]}
    assert [*place["probabilities"].values()] == [each["probability"] for each in same[1]["probabilities"]]
    assert (place["choice"], place["confidence"]) == (same[1]["choice"], same[1]["confidence"])
    assert far["legend"] == {"0": "near", "1": {"km": 5}}
    assert (far["score"], [*far["probabilities"]]) == (same[2]["score"], ["0", "1"])


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"questions": []}, 422, ["`questions`", "1 to 200"]),
        ({"questions": [PREDICATE] * 201}, 422, ["`questions`", "201"]),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}]}]}, 422, ["`questions[0].choices`", "2 to 255"]),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}] * 2}]}, 422, ["`questions[0].choices`", "equal"]),
        ({"questions": [{**SCORE, "levels": None}]}, 422, ["`questions[0].levels`", "required"]),
        ({"questions": [{**PREDICATE, "levels": []}]}, 422, ["`questions[0].levels`", "absent"]),
        (
            {"questions": [{**CHOICE, "choices": [{"value": 5}, {"value": "a"}]}]},
            422,
            ["questions[0].choices[0].value"],
        ),
        ({"questions": [{**PREDICATE, "type": "noul"}]}, 422, ["`questions[0].type`", "'noul'"]),
        ({"questions": [{**PREDICATE, "tools": []}]}, 422, ["questions[0].tools"]),
        ({"input": ""}, 400, ["`input`", "empty"]),
        ({"input": [{"role": "system", "content": "a"}]}, 422, ["`input[0].role`", "user", "'system'"]),
        ({"input": [{"type": "function_call", "name": "a"}]}, 422, ["`input[0].type`", "tools", "function_call"]),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            422,
            ["`input[0].content[0].type`", "images", "input_image"],
        ),
        ({"input": [5]}, 422, ["`input[0]`", "an object"]),
        ({"input": [{"role": "user", "content": [5]}]}, 422, ["`input[0].content[0].type`"]),
        ({"questions": [{**PREDICATE, "instructions": [{"type": "input_text"}]}]}, 422, ["instructions[0].text"]),
        ({"questions": [5]}, 422, ["`questions[0]`", "an object"]),
        (
            {"questions": [{**CHOICE, "choices": [{"value": str(n)} for n in range(250)]}] * 41},
            413,
            ["`questions`", "10250", "--max-client-documents"],
        ),
        (
            {
                "questions": [
                    {**CHOICE, "instructions": "a" * 50_000, "choices": [{"value": str(n)} for n in range(250)]}
                ]
            },
            413,
            ["`questions`", "12500000", "--payload-limit"],
        ),
        ({"model": "another"}, 404, ["another"]),
    ],
)
def test_refused_requests_of_openais_form(nli: Live, fields: dict[str, Any], status: int, words: list[str]) -> None:
    body = {"input": STATE, "questions": [PREDICATE], **fields}
    check_refused(nli.post("/v1/decisions", body), status, words)


@pytest.mark.parametrize(
    ("fields", "status", "location"),
    [
        ({"questions": {}}, 422, ["body", "questions"]),
        ({"questions": {"a": {**NOUL, "criteria": {"maybe": "b"}}}}, 422, ["body", "questions", "a", "criteria"]),
        ({"questions": {"a": {"type": "noul"}}}, 422, ["body", "questions", "a", "instructions"]),
        ({"questions": {"a": {"type": "score", "criteria": {}}}}, 422, ["body", "questions", "a", "criteria"]),
        ({"questions": {"a": {"type": "choice", "criteria": ["b"]}}}, 422, ["body", "questions", "a", "criteria"]),
        ({"questions": {"a": {"type": "box"}}}, 422, ["body", "questions", "a", "type"]),
        (
            {"questions": {"a": {"type": "score", "criteria": ["b", 0]}}},
            422,
            ["body", "questions", "a", "criteria", 1],
        ),
        ({"state": None}, 422, ["body", "state"]),
        ({"state": 1}, 422, ["body", "state"]),
    ],
)
def test_refused_requests_of_typesafes_form(
    nli: Live, fields: dict[str, Any], status: int, location: list[str | int]
) -> None:
    response = nli.post("/v1/systemone", {"state": STATE, "questions": {"met": NOUL}, **fields})
    check_refused(response, status, [])
    assert response.json()["detail"][0]["loc"] == location


def test_share_of_the_options_in_the_vocabulary(tmp_path: Path) -> None:
    folder = language_model(tmp_path, "qwen3", qwen, QWEN_TEMPLATE)
    asked, named = [PREDICATE, CHOICE, SCORE], {"met": NOUL}
    with live(str(folder), "--device", "cpu") as running:
        plain = running.post("/v1/decisions", {"input": STATE, "questions": asked}).json()["answers"]
        told = running.post("/v1/decisions", {"input": STATE, "questions": asked, "label_mass": True}).json()["answers"]
        masses = [each.pop("label_mass") for each in told]
        assert told == plain
        assert all(0 < mass < 1 for mass in masses)
        body = running.post("/v1/systemone", {"state": STATE, "questions": named, "label_mass": True}).json()
        assert body["answers"] == {"met": {"type": "noul", "noul": plain[0]["probability"]}}
        assert body["diagnostics"] == {"met": {"label_mass": masses[0]}}
        check_refused(running.post("/v1/embeddings", {"input": STATE}), 400, ["decide"])


def test_share_of_the_vocabulary_needs_a_language_model(nli: Live) -> None:
    body = {"input": STATE, "questions": [PREDICATE], "label_mass": True}
    check_refused(nli.post("/v1/decisions", body), 422, ["`label_mass`", "language models"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/decisions", {"input": STATE, "questions": [PREDICATE]}),
        ("/v1/systemone", {"state": STATE, "questions": {"met": NOUL}}),
    ],
)
def test_embedder_does_not_decide(server: Live, path: str, body: dict[str, Any]) -> None:
    check_refused(server.post(path, body), 424, ["decide", "embed"])
