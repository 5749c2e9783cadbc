"""The table of fields: every one of every route is honored, dropped or refused, and no other is read in silence."""

from __future__ import annotations

import json
from typing import Any, cast

import httpx
import pytest

from embert.server.frontend.routes import TASKS, TaskRoute
from embert.server.http.errors import Invalid
from embert.server.request.known_fields import KnownField, TranslatedFields, Verdict, header_value
from embert.server.request.request_body import RequestBody, parse
from tests.server.live import Live

ODD_VALUES: tuple[Any, ...] = (3, "some text", ["a"], {"a": 1}, True)


def reread(schema: type[RequestBody], body: dict[str, Any]) -> tuple[RequestBody, TranslatedFields | None]:
    noted: list[TranslatedFields] = []
    request = parse(schema, json.dumps(body).encode(), None, noted.append)
    return request, noted[0] if noted else None


def own_values(request: RequestBody) -> dict[str, Any]:
    return {name: getattr(request, name) for name in type(request).model_fields}


def of(task: TaskRoute, verdict: Verdict) -> dict[str, KnownField]:
    return {name: field for name, field in task.request.known.items() if field.verdict is verdict}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.path)
def test_the_table_has_every_field_of_a_schema(task: TaskRoute) -> None:
    own = task.request.model_fields.keys()
    known = task.request.known
    assert own <= known.keys()
    for name, field in known.items():
        assert field.apis
        honored_here = field.verdict is Verdict.HONORED and field.translation is None and not field.is_flat
        assert honored_here <= (name in own), name
        assert (name in own) <= (field.verdict is Verdict.HONORED), name
        assert honored_here or field.reason or name in own, name


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.path)
def test_harmless_fields_are_dropped_whatever_their_type(task: TaskRoute) -> None:
    plain = own_values(parse(task.request, json.dumps(task.example).encode()))
    for name in of(task, Verdict.HARMLESS):
        for value in ODD_VALUES:
            request, translated = reread(task.request, {**task.example, name: value})
            assert own_values(request) == plain, name
            assert translated is not None
            assert not translated.ignored


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.path)
def test_refused_fields_are_named(task: TaskRoute) -> None:
    plain = own_values(parse(task.request, json.dumps(task.example).encode()))
    for name, field in of(task, Verdict.REFUSED).items():
        for value in (None, *field.unless):
            assert own_values(reread(task.request, {**task.example, name: value})[0]) == plain, name
        assert not all(map(field.takes, ODD_VALUES))
        for value in (value for value in ODD_VALUES if not field.takes(value)):
            with pytest.raises(Invalid, match=f"^`{name}` ") as error:
                reread(task.request, {**task.example, name: value})
            assert error.value.param == name


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.path)
def test_honored_fields_under_another_name_are_the_schemas(task: TaskRoute) -> None:
    for name, field in of(task, Verdict.HONORED).items():
        for value in ("END", 3, True) if field.translation is not None else ():
            assert field.translation is not None
            targets = field.translation(value)
            assert targets.keys() <= task.request.model_fields.keys()
            (target, word), *_ = targets.items()
            body = {**task.example, name: value}
            body.pop(target, None)
            try:
                request, _ = reread(task.request, {**body, name: value})
            except Invalid as error:
                assert error.param in (name, target)  # noqa: PT017 - a value of another type
            else:
                assert getattr(request, target) == word, name


def test_two_names_of_one_field_must_agree() -> None:
    embeddings = TASKS[0].request
    same, translated = reread(embeddings, {"input": "a", "dimensions": 3, "output_dimension": 3})
    assert own_values(same)["dimensions"] == 3
    assert translated is not None
    with pytest.raises(Invalid, match="`output_dimension` is another name of `dimensions`") as error:
        reread(embeddings, {"input": "a", "dimensions": 4, "output_dimension": 3})
    assert error.value.param == "output_dimension"
    for path, body, name in (
        ("/v1/embeddings", {"input": "a", "normalized": True, "use_activation": False}, "use_activation"),
        ("/v1/embeddings", {"input": "a", "truncate": "END", "truncation": False}, "truncation"),
        ("/embed", {"inputs": "a", "normalize": True, "parameters": {"normalize": False}}, "normalize"),
        ("/embed", {"inputs": "a", "parameters": {"inputs": "b"}}, "inputs"),
    ):
        (schema,) = {task.request for task in TASKS if task.path == path}
        with pytest.raises(Invalid, match=f"`{name}`") as error:
            reread(schema, body)
        assert error.value.param == name


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.path)
def test_a_field_with_an_empty_name_leaves_the_others_as_they_are(task: TaskRoute) -> None:
    plain = own_values(parse(task.request, json.dumps(task.example).encode()))
    request, translated = reread(task.request, {"": 1, **task.example})
    assert own_values(request) == plain
    assert translated is not None
    assert translated.ignored == [""]


def test_header_of_many_and_odd_names() -> None:
    assert header_value(["a", "b"]) == b"a,b"
    assert header_value([""]) == b'""'
    odd = header_value(["x\r\ny: z", "ü" * 50, *map(str, range(30))])
    assert b"\r" not in odd and b" " not in odd  # noqa: PT018 - one header
    assert odd.endswith(b",+16")
    assert len(odd) < 400


# --- over HTTP ---


def test_unknown_fields_are_named_and_counted(server: Live, http: httpx.Client) -> None:
    before = server.metrics()["embert_ignored_fields_total"]
    response = http.post("/embed", json={"inputs": "a", "color": 1, "shape": [2], "user": "b"})
    assert response.headers["x-embert-ignored-fields"] == "color,shape"
    instances = [{"inputs": "a", "x": 1}, {"inputs": "b", "x": 1, "y": None}]
    assert http.post("/vertex", json={"instances": instances}).headers["x-embert-ignored-fields"] == "x,y"
    inner = {"inputs": {"source_sentence": "a", "sentences": ["b"], "c": 1}, "parameters": {"d": 2}}
    assert http.post("/similarity", json=inner).headers["x-embert-ignored-fields"] == "inputs.c,parameters.d"
    nested = http.post("/embed", json={"inputs": "a", "parameters": {"truncate": True, "parameters": {}, "z": 1}})
    assert nested.headers["x-embert-ignored-fields"] == "parameters,z"
    assert "x-embert-ignored-fields" not in http.post("/embed", json={"inputs": "a", "parameters": None}).headers
    assert "x-embert-ignored-fields" not in http.post("/embed", json={"inputs": "a", "user": 3}).headers
    assert server.metrics()["embert_ignored_fields_total"] == before + 9


def test_large_bodies_are_looked_at_too(http: httpx.Client) -> None:
    text = "a " * 40_000
    assert http.post("/embed", json={"inputs": text, "color": 1}).headers["x-embert-ignored-fields"] == "color"
    assert http.post("/v1/embeddings", json={"input": text, "late_chunking": True}).status_code == 422
    assert http.post("/v1/embeddings", json={"input": text, "truncation": False}).status_code == 422
    ids = {"inputs": [[101, 102]] * 8000, "normalized": False}
    assert http.post("/embed", json=ids).status_code == 413  # of 8000 texts, and not of a field


def test_errors_name_the_field_that_was_sent(http: httpx.Client) -> None:
    for path, body, name in (
        ("/v1/embeddings", {"input": "a", "output_dimension": 1000}, "output_dimension"),
        ("/v1/embeddings", {"input": "a", "output_dimension": "many"}, "output_dimension"),
        ("/embed", {"inputs": "a", "parameters": {"normalize": 3}}, "normalize"),
        ("/vertex", {"instances": [{"inputs": "a", "output_dimension": 1000}]}, "output_dimension"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": {"dimensions": 3}},
         "parameters.dimensions"),
    ):  # fmt: skip
        response = http.post(path, json=body)
        assert response.status_code == 422
        assert f"`{name}`" in response.text, response.text


def test_booleans_may_be_words_and_null_counts_as_absent(http: httpx.Client) -> None:
    plain = http.post("/embed", json={"inputs": "a", "normalize": False}).json()
    for body in (
        {"inputs": "a", "normalize": "false", "truncation_direction": None},
        {"inputs": "a", "normalized": "False", "color": None},
        {"inputs": "a", "parameters": {"normalize": "false"}},
    ):
        assert http.post("/embed", json=body).json() == plain


def vectors(http: httpx.Client, **fields: Any) -> list[Any]:
    response = http.post("/v1/embeddings", json={"input": ["one two three four five", "six"], **fields})
    assert response.status_code == 200, response.text
    return [cast("Any", each["embedding"]) for each in response.json()["data"]]


def test_what_other_apis_call_it(http: httpx.Client) -> None:
    """Fields of the other APIs, compared with the same request in embert's words."""
    for other, embert in (
        ({"output_dimension": 8, "output_dtype": "float"}, {"dimensions": 8}),
        ({"dimensions": 0, "modality": "text"}, {}),
        ({"normalized": False, "embedding_type": "float", "late_chunking": False}, {"normalize": False}),
        ({"embedding_type": "base64"}, {"encoding_format": "base64"}),
        ({"use_activation": False, "embed_dtype": "float32", "endianness": "native"}, {"normalize": False}),
        ({"truncate": "END", "truncate_prompt_tokens": 4}, {"truncate_prompt_tokens": 4}),
        ({"truncate": "START", "truncate_prompt_tokens": 4}, {"truncate_prompt_tokens": 4, "truncation_side": "left"}),
        ({"truncate": "NONE", "input_type": "passage", "modality": ["text", "text"]}, {}),
        ({"truncation": True, "truncate_prompt_tokens": -1, "priority": 3, "request_id": "r"}, {}),
    ):
        assert vectors(http, **other) == vectors(http, **embert), other
    assert vectors(http, truncate_prompt_tokens=4) != vectors(http)
