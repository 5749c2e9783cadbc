"""Pairs before they are tokens: bounds of their work that hold, and kinds that come back in their places."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embert import engine
from embert.engine import Encoded
from embert.engine.tokenization.encoded import TokenizeOptions
from embert.server.registry.tokenizing import TextPairs, interleave

texts = st.lists(st.sampled_from(["a", "cat—s", "unbelievably", "日本", "  ", "."]), max_size=9).map(" ".join)
limits = st.one_of(st.none(), st.integers(1, 12))


@pytest.fixture(scope="module")
def tokenizer() -> engine.Tokenizer:
    return engine.Tokenizer(engine.load_model())


@given(
    firsts=st.lists(texts, min_size=1, max_size=3),
    second=st.lists(texts, min_size=3, max_size=3),
    of_pair=st.one_of(st.none(), st.integers(5, 300)),
    of_first=limits,
    of_second=limits,
)
def test_the_bounds_hold(
    tokenizer: engine.Tokenizer,
    firsts: list[str],
    second: list[str],
    of_pair: int | None,
    of_first: int | None,
    of_second: int | None,
) -> None:
    seconds = second if len(firsts) == 1 else second[: len(firsts)]
    options = TokenizeOptions(limit=of_pair, first_limit=of_first, second_limit=of_second)
    encoded = tokenizer.encode_pairs(firsts, seconds, options)
    pairs = TextPairs(firsts, [*seconds])
    assert pairs.least_tokens(256, options) <= encoded.tokens <= pairs.most_tokens


def test_the_query_counts_in_every_pair() -> None:
    pairs = TextPairs(["query"], ["one", "three", None])
    assert (pairs.characters, pairs.size) == (15 + 8, 5 + 8)


def test_a_text_of_several_pairs_is_counted_and_copied_once() -> None:
    first, second = "a" * 1000, "b" * 10
    pairs = TextPairs([first] * 500, [second] * 500)
    assert (pairs.characters, pairs.size) == (505_000, 1010)
    prompted = pairs.with_prompt("query: ")
    assert prompted.firsts == ["query: " + first] * 500
    assert len({*map(id, prompted.firsts)}) == 1


def test_texts_and_pairs_come_back_in_their_places(tokenizer: engine.Tokenizer) -> None:
    pairs = TextPairs(["a", "b", "c", "d"], ["x", None, "y", None])
    singles, others = (pairs.of_kind(single=single, filler="z") for single in (True, False))
    assert [*singles.firsts] == ["z", "b", "z", "d"]
    assert ([*others.firsts], [*others.seconds]) == (["a", "z", "c", "z"], ["x", "", "y", ""])
    encoded = interleave(
        [False, True, False, True],
        tokenizer.encode(singles.firsts),
        tokenizer.encode_pairs(others.firsts, ["x", "", "y", ""]),
    )
    expected: list[Encoded] = [
        tokenizer.encode_pairs(["a"], ["x"]),
        tokenizer.encode(["b"]),
        tokenizer.encode_pairs(["c"], ["y"]),
        tokenizer.encode(["d"]),
    ]
    assert encoded.lengths.tolist() == [each.tokens for each in expected]
    assert encoded.ids.tolist() == [token for each in expected for token in each.ids.tolist()]
    types = [np.zeros(each.tokens) if each.token_types is None else each.token_types for each in expected]
    assert encoded.token_types is not None
    assert encoded.token_types.tolist() == np.concatenate(types).tolist()
