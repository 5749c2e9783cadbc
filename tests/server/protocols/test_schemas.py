"""Bodies that are not requests: errors that are short, name a field, and never hold the text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from embert.server.frontend.routes import TASKS
from embert.server.http.errors import BadRequest, Invalid, ServerError, describe_name
from embert.server.protocols.openai import EmbeddingsRequest
from embert.server.protocols.tei import EmbedRequest
from embert.server.protocols.tei_tokens import TokenizeRequest
from embert.server.request.request_body import RequestBody, parse

SCHEMAS = list(dict.fromkeys(task.request for task in TASKS))
FIELDS = sorted({name for schema in SCHEMAS for name in schema.model_fields} | {"source_sentence", "sentences"})
CANARY = "canary 9c1e"

numbers = st.one_of(st.integers(), st.integers(-(2**80), 2**80), st.floats())
texts = st.one_of(st.just(CANARY), st.text().map(lambda text: CANARY + text))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=12,
)
bodies = st.dictionaries(st.one_of(st.sampled_from(FIELDS), texts), values, max_size=5)


def check_message(error: ServerError) -> None:
    assert CANARY not in error.message
    assert len(error.message) < 400
    assert "\n" not in error.message
    if isinstance(error, Invalid) and error.param is not None:
        assert f"`{error.param}" in error.message


@given(schema=st.sampled_from(SCHEMAS), body=st.one_of(bodies, values))
@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
def test_every_body_is_a_request_or_an_error(schema: type[RequestBody], body: Any) -> None:
    try:
        parse(schema, json.dumps(body).encode())
    except (BadRequest, Invalid) as error:
        check_message(error)


@given(
    schema=st.sampled_from(SCHEMAS),
    body=st.binary(max_size=60),
    before=st.sampled_from([b"", b'{"inputs": "', b'{"input": [', b'{"ids": [[1, ']),
)
def test_every_string_of_bytes_is_an_error(schema: type[RequestBody], body: bytes, before: bytes) -> None:
    with pytest.raises((BadRequest, Invalid)) as error:
        parse(schema, before + body)
    check_message(error.value)


@given(value=values, index=st.integers(1, 5))
def test_the_place_that_is_named_is_the_wrong_one(value: Any, index: int) -> None:
    """One wrong value in a list of texts, and in a list of id lists."""
    if not isinstance(value, str | list):  # a list may hold ids
        body = ["a"] * index + [value] + ["a"] * (5 - index)
        with pytest.raises(Invalid) as error:
            parse(EmbedRequest, json.dumps({"inputs": body}).encode())
        assert f"`inputs[{index}]" in error.value.message
    if isinstance(value, bool) or not isinstance(value, int):
        lists: list[list[Any]] = [[1, 2]] * index + [[3, value]] + [[4]] * (5 - index)
        with pytest.raises(Invalid) as error:
            parse(EmbeddingsRequest, json.dumps({"input": lists}).encode())
        assert f"`input[{index}][1]" in error.value.message
        mixed = ["a", *lists]
        with pytest.raises(Invalid) as error:
            parse(EmbedRequest, json.dumps({"inputs": mixed}).encode())
        assert f"`inputs[{index + 1}][1]" in error.value.message


@pytest.mark.parametrize("item", [b"null", b"[]", b"[null]", b"[[]]", b'["a", 1]'])
@pytest.mark.parametrize("schema", [EmbedRequest, TokenizeRequest])
def test_many_wrong_items_are_few_errors(schema: type[EmbedRequest], item: bytes) -> None:
    """Each costs microseconds: with one for every item, ten megabytes of nulls took a minute of the event loop."""
    body = b'{"inputs": [' + b",".join([item] * 10_000) + b"]}"
    assert validation_errors(schema.model_validate_json, body) <= 10
    assert validation_errors(lambda body: schema.model_validate(json.loads(body)), body) <= 10


def validation_errors(validate: Callable[[bytes], BaseModel], body: bytes) -> int:
    try:
        validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("gpt-4", "'gpt-4'"),
        ("", "''"),
        ("it's", '"it\'s"'),
        ("two\nlines", "a string of 9 characters"),
        ("x" * 101, "a string of 101 characters"),
        ("\u202egpt", "a string of 4 characters"),
    ],
)
def test_names(name: str, described: str) -> None:
    assert describe_name(name) == described
