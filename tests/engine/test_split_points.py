"""Texts divided for tokenization: the parts' tokens are the whole's, whatever the text and the kind of tokenizer."""

# ruff: noqa: RUF001  # texts that look like others are the point
from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from embert import engine
from embert.engine.errors import InputError, InputTooLarge
from embert.engine.files.tokenizer_config import QWEN_PATTERN
from embert.engine.model import Model
from embert.engine.tokenization.encoded import NO_LIMIT, Chunking, Direction, TokenInfo, TokenizeOptions, finish
from embert.engine.tokenization.split_points import split_points_of
from tests.engine.conftest import AS_IT_STANDS, small_tokenizer
from tests.oracles.model_cases import byte_level, unigram

PART = 3  # characters, so short texts have many parts


def bert(**normalizer: Any) -> Backend:
    tokenizer = small_tokenizer(99)
    tokenizer.normalizer = normalizers.BertNormalizer(**normalizer)
    return tokenizer


def with_tokens(tokenizer: Backend, *tokens: AddedToken) -> Backend:
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def changed(tokenizer: Backend, **parts: Any) -> Backend:
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def precompiled_like() -> Any:
    """XLM-RoBERTa's normalizer without its table."""
    return normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    )


def qwen_words(pattern: str) -> Backend:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    words = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return with_tokens(
        changed(byte_level(300), normalizer=normalizers.NFC(), pre_tokenizer=words), AddedToken("<1>", normalized=False)
    )


MASK = AddedToken("<mask>", lstrip=True, normalized=False)
KINDS: dict[str, Callable[[], Backend]] = {
    "bert": bert,
    "bert, cased": lambda: bert(lowercase=False, strip_accents=False),
    "bert, ideographs not split": lambda: bert(handle_chinese_chars=False),
    "bert, controls kept": lambda: bert(clean_text=False),
    "bert, short words": lambda: changed(
        bert(), model=models.WordPiece(bert().get_vocab(), unk_token="[UNK]", max_input_chars_per_word=4)
    ),
    "bert, tokens that strip": lambda: with_tokens(bert(), MASK, AddedToken("[SEP]", rstrip=True, normalized=False)),
    "bert, tokens of normalized text": lambda: with_tokens(
        bert(), AddedToken("[a.b]"), AddedToken("日1", normalized=False)
    ),
    "bert, tokens that stand alone": lambda: with_tokens(bert(), AddedToken("ab", single_word=True), AddedToken("_a")),
    "byte-level": lambda: byte_level(300),
    "byte-level, prefix": lambda: changed(
        byte_level(300),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True),
        post_processor=processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=True),
    ),
    "byte-level, offsets with spaces": lambda: changed(
        byte_level(300), post_processor=processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=False)
    ),
    "byte-level, NFC": lambda: changed(byte_level(300), normalizer=normalizers.NFC()),
    "byte-level, tokens": lambda: with_tokens(byte_level(300), MASK, AddedToken("b2"), AddedToken("<1>")),
    "qwen": lambda: qwen_words(QWEN_PATTERN),
    "llama 3": lambda: qwen_words(QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")),
    "metaspace": lambda: unigram(300),
    "metaspace, first": lambda: changed(unigram(300), pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")),
    "metaspace, never": lambda: changed(unigram(300), pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="never")),
    "xlm-roberta": lambda: with_tokens(
        changed(
            unigram(300),
            normalizer=precompiled_like(),
            pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
        ),
        MASK,
    ),
    "xlm-roberta, later": lambda: changed(unigram(300), normalizer=precompiled_like()),
}


def chunked(tokenizer: engine.Tokenizer, **changes: int) -> engine.Tokenizer:
    """The tokenizer with other sizes of chunks."""
    other = copy.copy(tokenizer)
    other.chunking = dataclasses.replace(tokenizer.chunking, **changes)
    return other


@pytest.fixture(scope="module")
def divided(default_model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, engine.Tokenizer]:
    found = {}
    for name, make in KINDS.items():
        folder = tmp_path_factory.mktemp("tokenizer")
        make().save(str(folder / "tokenizer.json"))
        model = dataclasses.replace(
            default_model, folder=folder, transformer=".", max_input_length=9, tokenizer=AS_IT_STANDS
        )
        found[name] = engine.Tokenizer(model)
        found[name].chunking = Chunking(PART, PART + 2, NO_LIMIT)
    return found


words = st.sampled_from(
    [
        "a", "b", "the", "Ab", "b2", "2", "a1b2", "é", "e\u0301", "\u0301", "日", "本語", "한", "ば", "か\u3099", "Й",
        "İ", "ﬁ", "½", "№", "ﷺ", "\u0e33", "ก", "👍🏽", "👨\u200d👩", "\u200d", "\ufeff", "\u00ad", "\x00", "\x07",
        "\x0b", "\x1c", "\x85", ".", ",", "...", "-", "_", "'", "'s", "don't", "[", "]", "[SEP]", "[UNK]", "[a.b]",
        "[A.b]", "<mask>", "<", ">", "<1>", "<s>", "</s>", "_a", "ab", "日1", "abcde", "z" * 12, "。", "，", "！", "▁",
    ]
)  # fmt: skip
spaces = st.sampled_from([" ", " ", " ", "", "", "  ", "   ", "\n", "\r\n", "\t", "\n\n", "\u00a0", "\u3000", "\u2028"])
hostile = st.one_of(
    st.lists(st.tuples(words, spaces), max_size=14).map(lambda pairs: "".join(map("".join, pairs))),
    st.tuples(spaces, st.lists(words, max_size=9).map(" ".join), spaces).map("".join),
    st.text(max_size=12),
)
LENIENT = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(hostile, min_size=1, max_size=3), direction=st.sampled_from(["right", "left"]))
@LENIENT
def test_ids_are_those_of_the_whole(
    divided: dict[str, engine.Tokenizer], kind: str, texts: list[str], direction: Direction
) -> None:
    tokenizer = divided[kind]
    whole = tokenizer._backend.library_ids(texts)
    asked = tokenizer.encode_chunks(texts, TokenizeOptions(direction=direction))
    expected = tokenizer._frames[None].around(whole, True, direction, "inputs")
    encoded = finish(asked)
    assert encoded.ids.tolist() == expected.ids.tolist()
    assert encoded.lengths.tolist() == expected.lengths.tolist()
    assert encoded.truncated == expected.truncated


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(hostile, min_size=1, max_size=3), special=st.booleans())
@LENIENT
def test_offsets_are_those_of_the_whole(
    divided: dict[str, engine.Tokenizer], kind: str, texts: list[str], special: bool
) -> None:
    tokenizer = divided[kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("embert.engine.tokenization.offsets.CHUNK_CHARACTERS", PART)
        found = tokenizer.tokenize(texts, add_special_tokens=special)
    for text, tokens in zip(texts, found, strict=True):
        encoding = tokenizer._backend._library.encode(text, add_special_tokens=special)
        assert tokens == [
            TokenInfo(id_, name, True, None, None) if mask else TokenInfo(id_, text[start:stop], False, start, stop)
            for id_, name, (start, stop), mask in zip(
                encoding.ids, encoding.tokens, encoding.offsets, encoding.special_tokens_mask, strict=True
            )
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_these_kinds_are_divided(divided: dict[str, engine.Tokenizer], kind: str) -> None:
    for direction in ("right", "left"):
        tokenizer = chunked(divided[kind], chunk=PART, most_unbroken=PART + 1)
        asked = tokenizer.encode_chunks(["abc abc"], TokenizeOptions(direction=direction))
        assert len([*asked]) == 2


@pytest.mark.parametrize(
    "tokenizer",
    [
        changed(bert(), pre_tokenizer=None),
        changed(bert(), pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        changed(bert(), normalizer=normalizers.Sequence([normalizers.BertNormalizer(), normalizers.Prepend("x")])),
        with_tokens(bert(), AddedToken("two words")),
        with_tokens(byte_level(300), AddedToken("b", rstrip=True)),
        with_tokens(byte_level(300), AddedToken("b", lstrip=True)),
        changed(byte_level(300), normalizer=normalizers.Replace(" ", "_")),
        changed(byte_level(300), pre_tokenizer=pre_tokenizers.ByteLevel(use_regex=False)),
        changed(byte_level(300), model=models.BPE(dropout=0.5)),
        qwen_words(QWEN_PATTERN.replace("+", "")),
        changed(unigram(300), pre_tokenizer=pre_tokenizers.Metaspace(split=False)),
        changed(unigram(300), normalizer=normalizers.Replace(" ", "")),
    ],
    ids=range(12),
)
def test_unsafe_tokenizers_are_not_divided(tokenizer: Backend) -> None:
    split_points = split_points_of(json.loads(tokenizer.to_str()), tokenizer)
    assert (split_points.of_ids, split_points.of_offsets, split_points.lead) == (None, None, "")


def test_text_is_read_no_further_than_the_model_can(tokenizer: engine.Tokenizer, read: list[str]) -> None:
    for text in (
        "." * 3_000_000,
        "日本" * 1_000_000,
        "a\n" * 1_000_000,
        "a" + " " * 20 + "b" * 9_000 + "é 。" * 900_000,
    ):
        for direction in ("right", "left"):
            read.clear()
            bounded = chunked(tokenizer, most_unbroken=100_000)
            encoded = finish(bounded.encode_chunks([text], TokenizeOptions(direction=direction)))
            assert encoded.lengths.tolist() == [256]
            assert sum(map(len, read)) < 50_000
    with pytest.raises(InputError, match=r"`inputs`: text 0 has more than \d+ tokens, the limit is 256; shorten it or"):
        finish(tokenizer.encode_chunks(["." * 3_000_000], TokenizeOptions(truncate=False)))


def test_words_too_long_to_be_known_are_not_read_whole(tokenizer: engine.Tokenizer, read: list[str]) -> None:
    for text in ("x" * 1_000_000, "the " + "x1" * 300_000 + "é end", "ab." * 20 + "x" * 300_000 + " y" + "z" * 400_000):
        whole = tokenizer._backend.library_ids([text])
        expected = tokenizer._frames[None].around(whole, True, "right", "inputs").ids.tolist()
        for direction in ("right", "left"):
            read.clear()
            bounded = chunked(tokenizer, most_unbroken=100_000)
            asked = bounded.encode_chunks([text], TokenizeOptions(direction=direction))
            assert finish(asked).ids.tolist() == expected
            assert sum(map(len, read)) < 20_000


@pytest.mark.parametrize("kind", ["bert", "byte-level", "metaspace"])
def test_text_without_a_place_to_divide_it_is_refused(divided: dict[str, engine.Tokenizer], kind: str) -> None:
    tokenizer = chunked(divided[kind], most_unbroken=100_000)
    text = "é" * 200_000
    said = "`input`: text 1 has 200000 characters and no place to divide it for 100000 of them, which is the limit"
    for direction in ("right", "left"):
        with pytest.raises(InputTooLarge, match=re.escape(said)):
            finish(tokenizer.encode_chunks(["a", text], TokenizeOptions(direction=direction, param="input")))
    with pytest.raises(InputTooLarge, match="no place to divide it"):
        list(tokenizer.tokenize_chunks(["a", text]))
    assert finish(chunked(tokenizer, most_unbroken=200_000).encode_chunks([text])).sequences == 1
