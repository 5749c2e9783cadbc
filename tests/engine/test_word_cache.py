"""Caches of words: their ids are the library's for any text, and texts that are not known cost little."""

# ruff: noqa: RUF001  # texts that look like others are the point
from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from embert import engine
from embert.engine.files.tokenizer_config import QWEN_PATTERN
from embert.engine.tokenization.encoded import Direction
from embert.engine.tokenization.word_cache import (
    LEARN_EVERY,
    MAX_CHUNKS,
    ByteLevelCache,
    WordCache,
    word_cache_of,
)
from tests.engine.conftest import BuildBert
from tests.engine.test_split_points import changed, qwen_words, with_tokens
from tests.oracles.model_cases import byte_level
from tests.server.models import edit_json

ID_BYTES = 4


def as_bytes(chunks: Sequence[str]) -> list[bytes]:
    return [chunk.encode() for chunk in chunks]


def test_word_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embert.engine.tokenization.word_cache.MAX_CHUNKS", 50)
    cache = WordCache(as_bytes)
    for i in range(100):
        texts = [f"w{i} w{i + 1} {'x' * 65}", "same"]
        assert cache.ids(texts, None, "right") == [text.replace(" ", "").encode() for text in texts]
        assert len(cache._ids) <= 50
    assert "x" * 65 not in cache._ids
    many = " ".join(f"v{i}" for i in range(200))
    assert cache.ids([many], None, "right") == [many.replace(" ", "").encode()]
    assert len(cache._ids) <= 50
    assert MAX_CHUNKS > 50


@pytest.mark.parametrize(
    "token",
    [{"content": "two words"}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"normalized": True}],
    ids=str,
)
def test_added_tokens_that_look_around_turn_the_word_cache_off(build_bert: BuildBert, token: dict[str, Any]) -> None:
    folder = build_bert(vocab_size=99)
    added = {"id": 40, "content": "<x>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    description = json.loads((folder / "tokenizer.json").read_text())
    assert WordCache.supports({**description, "added_tokens": [{**added, "normalized": False}]})
    assert not WordCache.supports({**description, "added_tokens": [{**added, "normalized": False, **token}]})
    assert not WordCache.supports({**description, "normalizer": None})
    edit_json(folder / "tokenizer.json", added_tokens=[{**added, "normalized": False, **token}])
    library = Backend.from_file(str(folder / "tokenizer.json"))
    text = "a <x> two words<x>b <X> c"
    encoded = engine.Tokenizer(engine.load_model(str(folder))).encode([text])
    assert encoded.ids.tolist() == library.encode(text).ids


# --- byte-level tokenizers ---

MARKS = [AddedToken("<|im_end|>", normalized=False), AddedToken("<think>", normalized=True)]
SPACES = [AddedToken(" " * count) for count in (2, 3, 4)]
KINDS: dict[str, Callable[[], Backend]] = {
    "gpt-2": lambda: with_tokens(byte_level(400), *MARKS),
    "modernbert": lambda: with_tokens(
        changed(byte_level(400), normalizer=normalizers.NFC()),
        *MARKS,
        *SPACES,
        AddedToken("[MASK]", lstrip=True, normalized=False),
    ),
    "qwen": lambda: with_tokens(qwen_words(QWEN_PATTERN), *MARKS),
    "llama 3": lambda: with_tokens(qwen_words(QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), *MARKS),
}


class Reader:
    """The library, and the texts that it has read."""

    def __init__(self, tokenizer: Backend) -> None:
        self.tokenizer, self.texts = tokenizer, list[str]()

    def __call__(self, texts: Sequence[str]) -> list[bytes]:
        self.texts += texts
        encodings = self.tokenizer.encode_batch_fast([*texts], add_special_tokens=False)
        return [array("i", encoding.ids).tobytes() for encoding in encodings]

    def cache(self) -> ByteLevelCache:
        cache = word_cache_of(json.loads(self.tokenizer.to_str()), self)
        assert isinstance(cache, ByteLevelCache)
        return cache


@pytest.fixture(scope="module")
def caches() -> dict[str, tuple[Reader, ByteLevelCache]]:
    readers = {kind: Reader(make()) for kind, make in KINDS.items()}
    return {kind: (reader, reader.cache()) for kind, reader in readers.items()}


plain = st.sampled_from(
    [
        "a", "the", "don't", "I'LL", "we've", "'s", "x's", "1", "12", "12345", "3.14", "...", "?!", "(a)", "_", "a_b",
        "<|im_end|>", "<think>", "[MASK]", "[", "<|im_end|>a", "user",
    ]
)  # fmt: skip
other = st.sampled_from(
    [
        "é", "e\u0301", "\u0301", "日本", "한", "\u1100\u1161", "👩\u200d💻", "ſ", "'ſ", "ǅ", "½", "٣", "\u200b",
        "\ufeff", "\u037e", "\u1fef", "\u0345", "क्षि", "ก็",
    ]
)  # fmt: skip
between = st.sampled_from([*[" "] * 8, "\n", "\n\n", "\n\n\n", "  ", "   ", " \n", "\n ", "\r\n", ""])
odd = st.sampled_from(
    ["\t", "\t ", " \t", "\r\n ", "\r", "\x0b", "\x0c", "\x85", "\u00a0", " \u00a0", "\u2003", "\u2028", "\u3000",
     "\x1c", "\x1c ", " \x1f", "\x00", "\x7f"]
)  # fmt: skip
usual = st.lists(st.tuples(plain, between), max_size=40)
hostile = st.lists(st.tuples(st.one_of(plain, plain, other), st.one_of(between, between, between, odd)), max_size=25)
many_texts = st.lists(st.one_of(usual, hostile).map(lambda pairs: "".join(map("".join, pairs))), max_size=3)


@pytest.mark.parametrize("kind", KINDS)
@given(
    texts=many_texts,
    limit=st.sampled_from([None, None, 1, 2, 5, 20]),
    direction=st.sampled_from(["right", "left"]),
    at_once=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_ids_are_the_librarys(
    caches: dict[str, tuple[Reader, ByteLevelCache]],
    kind: str,
    texts: list[str],
    limit: int | None,
    direction: Direction,
    at_once: bool,
) -> None:
    reader, cache = caches[kind]
    if at_once:
        cache._pause = cache._left = 0  # otherwise few of these texts would be learned
    expected = reader(texts)
    for found in (cache.ids(texts, limit, direction), cache.known_ids(texts, limit, direction)):
        for ids, whole in zip(found or (), expected, strict=found is not None):
            if limit is None or len(whole) <= limit * ID_BYTES:
                assert ids == whole
            else:
                most = slice(limit * ID_BYTES) if direction == "right" else slice(-limit * ID_BYTES, None)
                assert len(ids) >= limit * ID_BYTES
                assert ids[most] == whole[most]


@pytest.mark.parametrize("kind", KINDS)
def test_known_texts_need_no_library(kind: str) -> None:
    reader = Reader(KINDS[kind]())
    cache = reader.cache()
    text = "the words of a text, the ones that <think> come again,\nare known. 12 of them don't; the others do!"
    (expected,) = reader([text])
    assert cache.known_ids([text], None, "right") is None
    assert cache.ids([text], None, "right") == [expected]
    reader.texts.clear()
    assert cache.ids([text], None, "right") == cache.known_ids([text], None, "right") == [expected]
    assert not reader.texts
    (longer,) = cache.ids([f"{text} novelty"], None, "right")
    assert reader.texts == [" novelty"]
    assert [longer] == reader([f"{text} novelty"])


def test_random_texts_are_read_once() -> None:
    reader = Reader(KINDS["qwen"]())
    cache, draw = reader.cache(), random.Random(0)
    texts = [" ".join(f"{draw.random():.9f}" for _ in range(50)) for _ in range(20 * LEARN_EVERY)]
    for text in texts:
        cache.ids([text], None, "right")
    assert reader.texts == texts
    assert len(cache._ids) <= 50 * (LEARN_EVERY + 20)


@pytest.mark.parametrize(
    ("kind", "tokenizer"),
    [
        ("gpt-2", lambda: with_tokens(byte_level(400), AddedToken("two words"))),
        ("gpt-2", lambda: with_tokens(byte_level(400), AddedToken("<x>", rstrip=True))),
        ("gpt-2", lambda: with_tokens(byte_level(400), AddedToken("<x>", single_word=True))),
        ("gpt-2", lambda: changed(byte_level(400), normalizer=normalizers.NFKC())),
        ("gpt-2", lambda: changed(byte_level(400), pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))),
        ("gpt-2", lambda: changed(byte_level(400), pre_tokenizer=pre_tokenizers.ByteLevel(use_regex=False))),
        ("gpt-2", lambda: changed(byte_level(400), model=models.BPE(dropout=0.5))),
        ("gpt-2", lambda: changed(byte_level(400), model=models.BPE({"a": 0}, []))),
        ("qwen", lambda: with_tokens(qwen_words(QWEN_PATTERN), AddedToken("<x>", lstrip=True))),
        ("qwen", lambda: with_tokens(qwen_words(QWEN_PATTERN), AddedToken("\na"))),
        ("qwen", lambda: qwen_words(QWEN_PATTERN.replace("+", ""))),
    ],
)
def test_tokenizers_that_look_across_chunks_have_no_cache(kind: str, tokenizer: Callable[[], Backend]) -> None:
    assert word_cache_of(json.loads(KINDS[kind]().to_str()), as_bytes) is not None
    assert word_cache_of(json.loads(tokenizer().to_str()), as_bytes) is None
