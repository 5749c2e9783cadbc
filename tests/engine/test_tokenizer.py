"""The tokenizer and its word cache, compared with the library."""

# ruff: noqa: RUF001  # texts that look like others are the point
from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from embert import engine
from embert.engine.errors import BrokenModel, InputError
from embert.engine.model import Model
from embert.engine.tokenization.encoded import Direction, TokenInfo, TokenizeOptions
from tests.engine.conftest import BuildBert


@pytest.fixture(scope="module")
def library(default_model: Model) -> Backend:
    backend = Backend.from_file(str(default_model.folder / "tokenizer.json"))
    backend.no_padding()
    backend.no_truncation()
    return backend


def sequences(encoded: engine.Encoded) -> list[list[int]]:
    assert encoded.ids.dtype == encoded.lengths.dtype == np.int32
    assert encoded.lengths.sum() == len(encoded.ids) == encoded.tokens
    pieces = np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])
    return [piece.tolist() for piece in pieces][: encoded.sequences]


def expected(library: Backend, text: str, limit: int = 256, direction: str = "right") -> list[int]:
    ids: list[int] = cutting(library, limit, direction).encode(text).ids
    return ids


@functools.cache  # making one takes longer than a test's texts
def cutting(library: Backend, limit: int, direction: str) -> Backend:
    """The same library, with truncation on."""
    copied = Backend.from_str(library.to_str())
    copied.enable_truncation(limit, direction=direction)
    return copied


TRICKY = [
    "", " ", "\n", "a", "A", " a", "a ", "a\tb", "a\nb", "a\r\nb", "a\x0bb", "a\x0cb", "a\x1cb", "a\x1db", "a\x1eb",
    "a\x1fb", "a\x00b", "a\x07b", "a\x7fb", "a\x80b", "a\x85b", "a\u00a0b", "a\u1680b", "a\u2003b", "a\u2028b",
    "a\u2029b", "\x00", "a \x00 b", "a \x07\x7f b",
    "a\u3000b", "a\u200bb", "a\ufeffb", "a\u00adb", "[MASK]", "a[MASK]b", "[mask]", "[MASK", "MASK]",
    "[ MASK ]", "[CLS][SEP]", "[UNK] [PAD]", "[[MASK]]", "[MA\nSK]", "##ing", "## ing", "un##do", "don't", "e-mail",
    "a...b", "...", "$5.99", "C++", "x_y", "#tag", "@me", "1/2", "50%", "\\n", "`code`", "~", "^", "|", "é", "e\u0301",
    "É", "ß", "İ", "ǅ",
    "日本", "a日b", "한국", "ｆｕｌｌ", "😀", "a😀b",
    "x" * 99, "x" * 100, "x" * 101, "x" * 1000, "x" * 64 + " " + "x" * 65,
    "a" * 63 + ".", "." * 300, "supercalifragilisticexpialidocious", "\u0378", "\U0010ffff",
]  # fmt: skip


@pytest.mark.parametrize("text", TRICKY, ids=ascii)
def test_tricky_texts(tokenizer: engine.Tokenizer, library: Backend, text: str) -> None:
    assert sequences(tokenizer.encode([text])) == [expected(library, text)]


ascii_texts = st.text(st.characters(max_codepoint=127))
words = st.lists(
    st.sampled_from(
        ["the", "Cat", "[MASK]", "[SEP]", "##s", "isn't", "\t", "\n", "\x1c", "\x0b", " ", "...", "É", "日", "x" * 70]
    ),
    max_size=30,
).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(ascii_texts, words, st.text()), max_size=5))
def test_equals_the_library(tokenizer: engine.Tokenizer, library: Backend, texts: list[str]) -> None:
    encoded = tokenizer.encode(texts)
    assert sequences(encoded) == [
        library.encode(text).ids[:256] if len(text) < 200 else expected(library, text) for text in texts
    ]


LIMITS = (3, 4, 9, 20)


@settings(max_examples=60, deadline=None)
@given(
    text=st.one_of(words, st.text(max_size=40)),
    limit=st.sampled_from(LIMITS),
    direction=st.sampled_from(["right", "left"]),
)
def test_truncation_equals_the_library(
    tokenizer: engine.Tokenizer,
    short_tokenizers: dict[int, engine.Tokenizer],
    library: Backend,
    text: str,
    limit: int,
    direction: Direction,
) -> None:
    """To what the model takes, and to a caller's own limit."""
    for encoded in (
        short_tokenizers[limit].encode([text], TokenizeOptions(direction=direction)),
        tokenizer.encode([text], TokenizeOptions(direction=direction, limit=limit)),
    ):
        assert sequences(encoded) == [expected(library, text, limit, direction)]
        assert encoded.truncated == (len(library.encode(text).ids) > limit)


@pytest.fixture(scope="module")
def short_tokenizers(default_model: Model) -> dict[int, engine.Tokenizer]:
    import dataclasses

    return {limit: engine.Tokenizer(dataclasses.replace(default_model, max_input_length=limit)) for limit in LIMITS}


def test_too_long_without_truncation(tokenizer: engine.Tokenizer) -> None:
    with pytest.raises(InputError) as caught:
        tokenizer.encode(["fine", "word " * 300], TokenizeOptions(truncate=False, param="input"))
    assert str(caught.value) == ("`input`: text 1 has 302 tokens, the limit is 256; shorten it or set truncate to true")
    assert (caught.value.param, caught.value.kind) == ("input", "validation")
    assert tokenizer.encode(["word " * 254], TokenizeOptions(truncate=False)).lengths.tolist() == [256]
    with pytest.raises(InputError, match="text 0 has 7 tokens, the limit is 6;"):
        tokenizer.encode(["word " * 5], TokenizeOptions(truncate=False, limit=6))
    assert tokenizer.encode(["word " * 300], TokenizeOptions(limit=1000)).lengths.tolist() == [256]
    assert tokenizer.encode(
        ["word"], TokenizeOptions(truncate=False, limit=tokenizer.least_limit())
    ).lengths.tolist() == [3]


@pytest.mark.parametrize("text", ["a\ud800", "\udfff é", "\ud83d"])
def test_lone_surrogates(tokenizer: engine.Tokenizer, text: str) -> None:
    with pytest.raises(InputError, match=r"`inputs`: text 1 is not valid Unicode: it has a lone surrogate$") as e:
        tokenizer.encode(["fine", text])
    assert e.value.kind == "tokenizer"
    with pytest.raises(InputError, match="lone surrogate"):
        tokenizer.tokenize([text])


def test_ids_are_taken_as_they_are(tokenizer: engine.Tokenizer) -> None:
    encoded = tokenizer.from_ids([[5, 6, 7], [0], [30_521]], TokenizeOptions(truncate=False))
    assert sequences(encoded) == [[5, 6, 7], [0], [30_521]]
    assert tokenizer.from_ids([]).sequences == 0
    long = list(range(300))
    for direction, kept in (("right", long[:256]), ("left", long[-256:])):
        cut = tokenizer.from_ids([long, [1]], TokenizeOptions(direction=direction))  # type: ignore[arg-type]
        assert sequences(cut) == [kept, [1]]
        assert cut.truncated == 1
    assert sequences(tokenizer.from_ids([[5, 6, 7]], TokenizeOptions(limit=2))) == [[5, 6]]
    assert tokenizer.from_ids([long], TokenizeOptions(limit=1000)).tokens == 256
    with pytest.raises(InputError, match="`inputs`: text 0 has 300 tokens, the limit is 256"):
        tokenizer.from_ids([long], TokenizeOptions(truncate=False))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "`input`: sequence 1 has no token ids"),
        ([3, -1], "`input`: sequence 1 has the token id -1; ids are integers from 0 to 30521"),
        ([30_522], "`input`: sequence 1 has the token id 30522; ids are integers from 0 to 30521"),
        ([1 << 31], "`input`: sequence 1 has the token id 2147483648; ids are integers from 0 to 30521"),
        ([10**5000], "`input`: sequence 1 has the token id out of all bounds; ids are integers from 0 to 30521"),
        ([True], "`input`: sequence 1 has the token id True; ids are integers from 0 to 30521"),
        ([1.0], "`input`: sequence 1 has the token id 1.0; ids are integers from 0 to 30521"),
        ([float("nan")], "`input`: sequence 1 has the token id nan; ids are integers from 0 to 30521"),
    ],
)
def test_bad_ids(tokenizer: engine.Tokenizer, ids: list[Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        tokenizer.from_ids([[1], ids], TokenizeOptions(param="input"))
    assert str(caught.value) == message
    assert caught.value.param == "input"
    if ids:
        with pytest.raises(InputError):
            tokenizer.decode([[1], ids])


def test_tokenize(tokenizer: engine.Tokenizer) -> None:
    assert tokenizer.tokenize(["Héllo naïvety"]) == [
        [
            TokenInfo(101, "[CLS]", True, None, None),
            TokenInfo(7592, "Héllo", False, 0, 5),
            TokenInfo(15743, "naïve", False, 6, 11),
            TokenInfo(3723, "ty", False, 11, 13),
            TokenInfo(102, "[SEP]", True, None, None),
        ]
    ]
    (bare,) = tokenizer.tokenize(["cats"], add_special_tokens=False)
    assert [token.text for token in bare] == ["cats"]
    (prompted,) = tokenizer.tokenize(["cats"], prompt="é: ")
    assert [(t.text, t.start, t.stop) for t in prompted[1:-1]] == [("é", 0, 1), (":", 1, 2), ("cats", 3, 7)]
    assert tokenizer.tokenize([]) == []
    assert len(tokenizer.tokenize(["word " * 1000])[0]) == 1002


def test_decode(tokenizer: engine.Tokenizer) -> None:
    assert tokenizer.decode([[101, 7592, 2088, 102], []]) == ["hello world", ""]
    assert tokenizer.decode([[101, 7592, 102]], skip_special_tokens=False) == ["[CLS] hello [SEP]"]


def test_several_threads(default_model: Model, library: Backend, real_texts: list[str]) -> None:
    tokenizer = engine.Tokenizer(default_model)
    texts = [text for text in real_texts if len(text) < 2000][:200]
    known = [expected(library, text) for text in texts]
    wrong: list[str] = []

    def work(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(texts))
        wrong.extend(texts[i] for i in order if sequences(tokenizer.encode([texts[i]])) != [known[i]])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_known_words_need_no_library() -> None:
    tokenizer = engine.Tokenizer(engine.load_model())
    for texts in (["some words", "and more words"], ["words " * 400], []):
        tokenizer.encode(texts)
        for direction in ("right", "left"):
            known = tokenizer.encode_known(texts, TokenizeOptions(direction=direction))
            whole = tokenizer.encode(texts, TokenizeOptions(direction=direction))
            assert known is not None
            assert sequences(known) == sequences(whole)
            assert known.truncated == whole.truncated
    assert tokenizer.encode_known(["some unseen words"]) is None
    assert tokenizer.encode_known(["some wörds"]) is None
    assert tokenizer.encode_known(["some words"], prompt="unseen: ") is None
    with pytest.raises(InputError, match="text 1 has 402 tokens, the limit is 256"):
        tokenizer.encode_known(["some", "words " * 400], TokenizeOptions(truncate=False, param="input"))


def test_tokenizer_that_cannot_be_read(build_bert: BuildBert) -> None:
    folder = build_bert()
    model = engine.load_model(str(folder))
    path = folder / "tokenizer.json"
    good = path.read_text()
    path.write_text(good[:500])
    with pytest.raises(BrokenModel, match=r"tokenizer\.json is not valid JSON: "):
        engine.Tokenizer(model)
    path.write_text('{"version": "1.0"}')
    with pytest.raises(BrokenModel, match=r"tokenizer\.json is not a tokenizer that can be read: "):
        engine.Tokenizer(model)


def test_no_room_for_text(build_bert: BuildBert) -> None:
    folder = build_bert()
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 2}')
    with pytest.raises(BrokenModel, match="within max_input_length 2"):
        engine.Tokenizer(engine.load_model(str(folder)))
