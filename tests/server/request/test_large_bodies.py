"""Bodies of many values: errors before parsing, and ids that are parsed separately from the fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from embert.server.http.errors import BadRequest, Invalid, PayloadTooLarge
from embert.server.protocols.openai import EmbeddingsRequest
from embert.server.protocols.tei import EmbedRequest
from embert.server.protocols.tei_tokens import DecodeRequest
from embert.server.request.large_bodies import check_values, memory_of, split_ids
from embert.server.request.request_body import RequestBody, parse

texts = st.text(st.sampled_from('a,"\\[]{}:é\n'), max_size=12)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.floats(allow_nan=False), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=20,
)
ids = st.integers(-3, 2**70)
lists_of_ids = st.one_of(st.lists(ids, max_size=5), st.lists(st.lists(ids, max_size=4), max_size=4))
odd: st.SearchStrategy[Any] = st.sampled_from([1.0, 1e3, 1.5, True, None, "1", [[1]], [], {}])


def counts(value: Any) -> tuple[int, int]:
    """Strings, lists and objects of a JSON document, and its values."""
    if isinstance(value, str):
        return 1, 1
    inside = []
    if isinstance(value, list):
        inside = [counts(each) for each in value]
    elif isinstance(value, dict):
        inside = [counts(each) for pair in value.items() for each in pair]
    own = isinstance(value, list | dict)
    return own + sum(texts for texts, _ in inside), 1 + sum(number for _, number in inside)


@given(value=values, ascii_only=st.booleans())
def test_what_the_limits_allow_is_never_refused(value: Any, ascii_only: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for others in ("_OTHER_STRINGS", "_OTHER_CONTAINERS", "_OTHER_VALUES"):
            patch.setattr(f"embert.server.request.large_bodies.{others}", 0)
        texts, number = counts(value)
        check_values(json.dumps(value, ensure_ascii=ascii_only).encode(), texts, number)


@pytest.mark.parametrize(
    ("body", "texts", "values", "says"),
    [
        (b'{"inputs": [' + b",".join([b'"a"'] * 7000) + b"]}", 2048, 1 << 19, ("7001", "6144", "2048")),
        (b'{"inputs": [' + b"1," * 100_000 + b"1]}", 2048, 1000, ("100000", "66536")),
        (b'{"inputs": "a, \\", \\\\", "x": [' + b"{}," * 100_000 + b"1]}", 2048, 1000, ("100002", "12288", "2048")),
        (b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 2048, 1000, ("100001", "12288", "2048")),
    ],
    ids=["strings", "values", "objects", "lists"],
)
def test_more_than_the_limits_is_refused(body: bytes, texts: int, values: int, says: tuple[str, ...]) -> None:
    with pytest.raises(PayloadTooLarge) as refused:
        check_values(body, texts, values)
    assert all(value in refused.value.message for value in says)
    check_values(b'{"inputs": "' + b'a, \\" [{b\\\\,' * 1_000_000 + b'"}', 1, 1)


@given(
    inputs=st.one_of(lists_of_ids, values, st.lists(st.one_of(ids, odd), max_size=4)),
    others=st.dictionaries(st.one_of(texts, st.sampled_from(["truncate", "input", "x"])), values, max_size=2),
    last=st.booleans(),
    spaces=st.sampled_from(["", " ", "\n\t"]),
)
def test_split_ids_equal_those_of_a_whole_body(inputs: Any, others: dict[str, Any], last: bool, spaces: str) -> None:
    document = {**others, "inputs": inputs} if last else {"inputs": inputs, **others}
    body = json.dumps(document, separators=(f",{spaces}", f"{spaces}:{spaces}")).encode()
    assert len(set(readings(body))) == 1


def readings(body: bytes) -> list[str]:
    """The results of `parse` for a whole body, and with its ids split off."""
    found = []
    for split in (None, split_ids(body)):
        try:
            found.append(repr(parse(EmbedRequest, body, split)))
        except (BadRequest, Invalid) as error:
            found.append(error.message)
    return found


@pytest.mark.parametrize(
    ("schema", "field"), [(EmbedRequest, "inputs"), (EmbeddingsRequest, "input"), (DecodeRequest, "ids")]
)
@pytest.mark.parametrize("ids_", [[1, 2**80], [[1, 2], [3]]])
def test_ids_of_every_route(schema: type[RequestBody], field: str, ids_: list[Any]) -> None:
    body = json.dumps({"truncate": True, field: ids_, "user": "a"}).encode()
    split = split_ids(body)
    assert split is not None
    assert getattr(parse(schema, body, split), field) == ids_


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs": [1], "inputs": "a"}', b'{"inputs": [1], "inputs": [2]}', b'{"x": {"inputs": [1]}, "inputs": "a"}',
        b'{"inputs": [1]} x', b'{"inputs": [1', b'{"inputs": [01]}', b'{"inputs": [1],}', b'{"inputs": [1], "a": [1]]}',
        b'{"inputs": [[1], 2]}', b'{"inputs": [1.0]}', b'{"inputs": [1E2]}', b'{"inputs": ["\\"inputs\\": [1]"]}',
        b'{"inputs": [-1099511627776]}', b'{"truncate": 3, "inputs": [1]}', b'\xff{"inputs": [1]}',
    ],
)  # fmt: skip
def test_almost_valid_bodies(body: bytes) -> None:
    assert len(set(readings(body))) == 1


class Inner(BaseModel):
    text: str


class Outer(RequestBody):
    inputs: Any = None
    rest: list[Inner] | None = None


@pytest.mark.parametrize(
    ("body", "least"),
    [
        (Outer(inputs="a" * 1000), 1000),
        (Outer(inputs="a" * 1000 + "🙂"), 4004),  # four bytes for each letter
        (Outer(inputs=["é" * 1000, "a" * 500]), 1500),
        (Outer(rest=[Inner(text="a" * 1000)] * 3), 3000),
        (Outer(inputs=[[300, 301, 302]] * 10), 30 * 36),  # sys.getsizeof(300), and a reference
        (Outer(inputs=[[[]] * 10] * 10), 100 * 56),  # sys.getsizeof([])
        ({"instances": [{"inputs": "a" * 1000}]}, 1000),
    ],
    ids=["ascii", "emoji", "list", "objects", "ids", "lists", "dict"],
)
def test_the_memory_of_a_parsed_body(body: object, least: int) -> None:
    assert least <= memory_of(body) <= 2 * least + 1000
