"""Pairs of texts, compared with transformers' fast tokenizers."""

# ruff: noqa: RUF001  # texts that look like others are the point
from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from embert import engine
from embert.engine.errors import InputError, InputTooLarge
from embert.engine.files.tokenizer_config import read_tokenizer_config
from embert.engine.model import Model
from embert.engine.tokenization import backend
from embert.engine.tokenization.encoded import Direction, TokenizeOptions, finish
from tests.engine.conftest import AS_IT_STANDS, small_tokenizer
from tests.engine.test_split_points import chunked
from tests.oracles.model_cases import byte_level, unigram

MARKS = [("<s>", 0), ("</s>", 2)]


def template(pair: str | None, *before: Any) -> Any:
    last = processors.TemplateProcessing("<s> $A </s>", pair, MARKS)
    return processors.Sequence([*before, last]) if before else last


def with_processor(tokenizer: Backend, processor: Any) -> Backend:
    tokenizer.post_processor = processor
    return tokenizer


# Name → the tokenizer, and how many token types the model has.
KINDS: dict[str, tuple[Callable[[], Backend], int]] = {
    "bert": (lambda: small_tokenizer(99), 2),
    "roberta": (lambda: byte_level(300), 1),
    "xlm-roberta": (lambda: with_processor(unigram(300), template("<s> $A </s> </s> $B </s>")), 1),
    "mpnet": (lambda: with_processor(unigram(300), template("<s>:0 $A:0 </s>:0 </s>:0 $B:1 </s>:1")), 1),
    "byte-level with types": (
        lambda: with_processor(byte_level(300), template("<s> $A </s> $B:1 </s>:1", processors.ByteLevel())),
        2,
    ),
}
LIMITS = (6, 9, 10)  # tokens: rooms of odd and even size
PART = 3  # characters, so short texts have many parts


@dataclasses.dataclass
class Kind:
    """One tokenizer, and transformers' own."""

    tokenizers: dict[int, engine.Tokenizer]  # by max_input_length
    hugging_face: Any
    types: int  # that the model has

    def expected(self, first: str, second: str, limit: int, side: str) -> tuple[list[int], list[int]]:
        """Ids and token types."""
        self.hugging_face.truncation_side = side
        # Lists, because an empty second string would be taken for none.
        found = self.hugging_face(
            [first], [second], truncation="longest_first", max_length=limit, return_token_type_ids=True, verbose=False
        )
        (ids,), (types,) = found["input_ids"], found["token_type_ids"]
        return ids, types if self.types > 1 else [0] * len(ids)

    def tokens(self, text: str) -> int:
        return len(self.hugging_face(text, add_special_tokens=False, verbose=False)["input_ids"])


def saved(model: Model, folder: Path, tokenizer: Backend, *, types: int = 2, limit: int = 9) -> Model:
    """`model` with another tokenizer."""
    tokenizer.save(str(folder / "tokenizer.json"))
    encoder_config = dataclasses.replace(model.config, type_vocab_size=types)
    return dataclasses.replace(
        model, folder=folder, transformer=".", max_input_length=limit, config=encoder_config, tokenizer=AS_IT_STANDS
    )


@pytest.fixture(scope="module")
def kinds(default_model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    found = {}
    fast: Any = transformers.PreTrainedTokenizerFast  # which has no types
    for name, (make, types) in KINDS.items():
        model = saved(default_model, tmp_path_factory.mktemp("tokenizer"), make(), types=types)
        hugging_face = fast(tokenizer_file=str(model.folder / "tokenizer.json"))
        tokenizers = {limit: engine.Tokenizer(dataclasses.replace(model, max_input_length=limit)) for limit in LIMITS}
        found[name] = Kind(tokenizers, hugging_face, types)
    return found


def pairs_of(encoded: engine.Encoded) -> list[tuple[list[int], list[int]]]:
    """Ids and token types of each pair."""
    assert encoded.ids.dtype == encoded.lengths.dtype == np.int32
    assert encoded.lengths.sum() == len(encoded.ids)
    types = np.zeros_like(encoded.ids) if encoded.token_types is None else encoded.token_types
    assert types.dtype == np.int32
    assert types.shape == encoded.ids.shape
    cuts = np.cumsum(encoded.lengths)[:-1]
    ids = np.split(encoded.ids, cuts)[: encoded.sequences]
    return [(a.tolist(), b.tolist()) for a, b in zip(ids, np.split(types, cuts), strict=False)]


texts = st.one_of(
    st.lists(st.sampled_from(["a", "Ab", "b2", "é", "日本", ".", "[SEP]", "</s>", "x" * 9, " "]), max_size=12).map(
        " ".join
    ),
    st.integers(0, 12).map("a ".__mul__),
    st.text(max_size=8),
)


@pytest.mark.parametrize("name", KINDS)
@given(
    firsts=st.lists(texts, min_size=1, max_size=3),
    seconds=st.lists(texts, min_size=3, max_size=3),
    limit=st.sampled_from(LIMITS),
    direction=st.sampled_from(["right", "left"]),
    divided=st.booleans(),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_equals_transformers(
    kinds: dict[str, Kind],
    name: str,
    firsts: list[str],
    seconds: list[str],
    limit: int,
    direction: Direction,
    divided: bool,
) -> None:
    kind, many = kinds[name], firsts * 3 if len(firsts) == 1 else firsts
    seconds = seconds[: len(many)]
    room = limit - kind.hugging_face.num_special_tokens_to_add(pair=True)
    counts = [(kind.tokens(first), kind.tokens(second)) for first, second in zip(many, seconds, strict=True)]
    tokenizer = chunked(kind.tokenizers[limit], **({"part": PART, "chunk": PART + 2} if divided else {"part": 100}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("embert.engine.tokenization.pairs.special_tokens.CHUNK_TOKENS", 12)
        asked = tokenizer.encode_pairs_chunks(firsts, seconds, TokenizeOptions(direction=direction))
        encoded = finish(asked)
    assert pairs_of(encoded) == [kind.expected(*pair, limit, direction) for pair in zip(many, seconds, strict=True)]
    assert encoded.truncated == sum(first + second > room for first, second in counts)


@pytest.fixture(scope="module")
def packaged(default_model: Model) -> Kind:
    tokenizers = {
        limit: engine.Tokenizer(dataclasses.replace(default_model, max_input_length=limit)) for limit in (12, 13)
    }
    return Kind(tokenizers, transformers.AutoTokenizer.from_pretrained(default_model.folder), 2)


@pytest.mark.parametrize("direction", ["right", "left"])
@pytest.mark.parametrize("limit", [12, 13])
def test_truncation_of_pairs(packaged: Kind, limit: int, direction: Direction) -> None:
    room, tokenizer = limit - 3, packaged.tokenizers[limit]
    words = ["Which", "cat", "sat", "on", "a", "tiny", "mat", "while", "dogs", "barked", "at", "Zoë’s", "house"]
    cut = 0
    for first in range(len(words)):
        for second in range(len(words)):
            pair = " ".join(words[:first]), " ".join(words[len(words) - second :])
            encoded = tokenizer.encode_pairs(pair[:1], pair[1:], TokenizeOptions(direction=direction))
            assert pairs_of(encoded) == [packaged.expected(*pair, limit, direction)]
            cut += encoded.truncated
            again = tokenizer.encode_known_pairs(pair[:1], pair[1:], TokenizeOptions(direction=direction))
            assert again is None or pairs_of(again) == pairs_of(encoded)
            undecided = room % 2 and all(packaged.tokens(text) > room for text in pair)
            assert (again is None) == ("Zoë’s" in " ".join(pair) or undecided)
    assert cut > 20


def test_two_texts_over_the_room(packaged: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longer one gets the odd token. Texts that are too long to compare count as equal."""
    lengths = ((30, 20), (20, 30), (20, 20), (90, 70), (70, 71), (12, 11), (10, 9), (9, 10))
    firsts, seconds = (["a " * first for first, _ in lengths], ["b " * second for _, second in lengths])
    for texts in (firsts, firsts[3:4]):
        encoded = packaged.tokenizers[12].encode_pairs(texts, seconds)
        whole = texts if len(texts) > 1 else texts * len(seconds)
        expected = [packaged.expected(*pair, 12, "right") for pair in zip(whole, seconds, strict=True)]
        assert pairs_of(encoded) == expected
    monkeypatch.setattr("embert.engine.tokenization.pairs.special_tokens.COMPARED_TOKENS", 15)
    encoded = packaged.tokenizers[12].encode_pairs(["a " * 30], ["b " * 20, "b " * 14])
    assert [(ids.count(1037), ids.count(1038)) for ids, _ in pairs_of(encoded)] == [(4, 5), (5, 4)]


@pytest.mark.parametrize("direction", ["right", "left"])
@pytest.mark.parametrize("limits", [(None, 3, None), (None, None, 2), (12, 4, 5), (9, 1, 20), (8, None, 3), (20, 9, 9)])
def test_limits_cut_as_if_the_texts_were_shorter_and_the_model_smaller(
    packaged: Kind, default_model: Model, limits: tuple[int | None, int | None, int | None], direction: Direction
) -> None:
    pair, *texts_limits = limits
    smaller = dataclasses.replace(default_model, max_input_length=min(pair or 13, 13))
    tokenizer, oracle = packaged.tokenizers[13], engine.Tokenizer(smaller)
    words = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen".split()  # noqa: SIM905

    def shortened(text: str, limit: int | None) -> str:
        each = text.split()
        return " ".join(each if limit is None else each[:limit] if direction == "right" else each[-limit:])

    for first in range(0, 15, 2):
        for second in range(0, 15, 3):
            texts = " ".join(words[:first]), " ".join(words[15 - second :])
            cut = [shortened(text, limit) for text, limit in zip(texts, texts_limits, strict=True)]
            expected = oracle.encode_pairs(cut[:1], cut[1:], TokenizeOptions(direction=direction))
            options = TokenizeOptions(None, direction, *limits)
            found = tokenizer.encode_pairs(texts[:1], texts[1:], options)
            assert pairs_of(found) == pairs_of(expected)
            assert found.truncated == max(expected.truncated, cut != [*texts])
            again = tokenizer.encode_known_pairs(texts[:1], texts[1:], options)
            assert again is not None
            assert pairs_of(again) == pairs_of(expected)
    with pytest.raises(InputError, match="`texts`: a pair of texts has at least 5 tokens, and 4 are allowed"):
        tokenizer.encode_pairs(["a"], ["b"], TokenizeOptions(limit=4))
    assert tokenizer.encode_pairs(["a"], ["b"], TokenizeOptions(truncate=False, limit=4)).lengths.tolist() == [5]


def test_query_is_read_once_and_long_texts_no_further_than_needed(tokenizer: engine.Tokenizer, read: list[str]) -> None:
    long = "." * 3_000_000
    for query, documents, most in (
        ("a query", ["one", long, "日本" * 1_000_000, "two"], 20_000),
        (long, ["one"], 20_000),
        (long, ["one", long], 200_000),  # the longer one gets the odd token
    ):
        for direction in ("right", "left"):
            read.clear()
            asked = tokenizer.encode_pairs_chunks([query], documents, TokenizeOptions(direction=direction))
            assert finish(asked).lengths.max() == 256
            assert sum(map(len, read)) < most
            assert read.count("a query") == (query == "a query")
    read.clear()
    with pytest.raises(InputError, match=r"^`query`: pair 0 has more than \d+ tokens, the limit is 256; shorten it or"):
        finish(tokenizer.encode_pairs_chunks([long], ["not read"], TokenizeOptions(truncate=False, param="query")))
    assert "not read" not in read
    with pytest.raises(InputError, match=r"^`texts`: pair 1 has more than \d+ tokens, the limit is 256; shorten it or"):
        finish(tokenizer.encode_pairs_chunks(["a"], ["b", long], TokenizeOptions(truncate=False)))


@pytest.mark.parametrize(
    ("firsts", "seconds", "message"),
    [
        (["a"], ["b", "b " * 253], "`text_2`: pair 1 has 257 tokens, the limit is 256"),
        (["a", "a b"], ["b", "b " * 252], "`text_2`: pair 1 has 257 tokens, the limit is 256"),
        (["a " * 253], ["", "b"], "`text_1`: pair 1 has 257 tokens, the limit is 256"),
        (["a " * 254], ["", "b"], "`text_1`: pair 0 has more than 256 tokens, the limit is 256"),
        (["a", "b"], ["a"], "`text_1` has 2 texts and `text_2` has 1; the former must have one text, or as many as"),
        ([], ["a"], "`text_1` has 0 texts and `text_2` has 1; "),
        (["a\ud800"], ["b"], "`text_1`: text 0 is not valid Unicode: it has a lone surrogate"),
        (["a"], ["b", "\ud800"], "`text_2`: text 1 is not valid Unicode: it has a lone surrogate"),
    ],
)
def test_errors(tokenizer: engine.Tokenizer, firsts: list[str], seconds: list[str], message: str) -> None:
    options = TokenizeOptions(truncate=False, param="text_1", second_param="text_2")
    for chunk in (4, 1 << 20):
        with pytest.raises(InputError, match=f"^{re.escape(message)}") as caught:
            finish(chunked(tokenizer, chunk=chunk).encode_pairs_chunks(firsts, seconds, options))
        assert caught.value.param == message.split("`")[1]
    assert tokenizer.encode_pairs(["a"], ["b " * 252], TokenizeOptions(truncate=False)).lengths.tolist() == [256]


def test_text_without_a_place_to_divide_it_is_refused(kinds: dict[str, Kind]) -> None:
    tokenizer = chunked(kinds["roberta"].tokenizers[9], part=100, most_unbroken=1000)
    for firsts, seconds, param in ((["é" * 2000], ["a"], "query"), (["a"], ["a", "é" * 2000], "texts")):
        with pytest.raises(InputTooLarge, match=rf"`{param}`: text \d has 2000 characters and no place to divide it"):
            finish(tokenizer.encode_pairs_chunks(firsts, seconds))


def test_no_pairs(tokenizer: engine.Tokenizer) -> None:
    for firsts in ([], ["a"]):
        encoded = tokenizer.encode_pairs(firsts, [])
        assert (encoded.tokens, encoded.sequences, encoded.truncated) == (0, 0, 0)
        assert encoded.lengths.dtype == np.int32


def test_number_of_tokens_comes_before_their_ids(tokenizer: engine.Tokenizer) -> None:
    chunks = chunked(tokenizer, chunk=1 << 20).encode_pairs_chunks(["a " * 200], ["b"] * 2000)
    assert next(chunks) == 2000 * 204  # where the caller may stop
    encoded = finish(chunks)
    assert encoded.lengths.tolist() == [204] * 2000
    assert pairs_of(encoded) == pairs_of(tokenizer.encode_pairs(["a " * 200], ["b"])) * 2000


def test_token_types_that_the_model_has_not(kinds: dict[str, Kind], default_model: Model, tmp_path: Path) -> None:
    for name, kind in kinds.items():
        encoded = kind.tokenizers[9].encode_pairs(["a"], ["b"])
        assert (encoded.token_types is None) == (kind.types == 1), name
    # transformers gives a model no token types where its tokenizer does not name them.
    auto: Any = transformers.AutoTokenizer
    model = saved(default_model, tmp_path, small_tokenizer(99))
    for names in (["input_ids", "attention_mask"], ["input_ids", "token_type_ids"]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_input_names": names}))
        (tmp_path / "config.json").write_text('{"model_type": "bert"}')
        found = auto.from_pretrained(tmp_path)("a", "b")
        config, _ = read_tokenizer_config(tmp_path, {"model_type": "bert"})
        tokenizer = engine.Tokenizer(dataclasses.replace(model, tokenizer=config))
        encoded = tokenizer.encode_pairs(["a"], ["b"])
        assert (encoded.token_types is None) == ("token_type_ids" not in found)


SAID = "the tokenizer cannot encode pairs of texts: its post-processor"


@pytest.mark.parametrize(
    ("processor", "limit", "message"),
    [
        (template("<s> $B </s> $A </s>"), 9, SAID + " swaps them"),
        (template("<s> $A </s> $A </s> $B"), 9, SAID + " puts special tokens inside a text, not around it"),
        (template("<s> $A </s> $B:2"), 9, SAID + " gives token type 2, the model has 2 types"),
        (
            template("<s> $A </s> </s> $B </s>"),
            5,
            "special tokens leave no space for pairs of texts within max_input_length 5",
        ),
    ],
)
def test_tokenizers_without_pairs(
    default_model: Model, tmp_path: Path, processor: Any, limit: int, message: str
) -> None:
    model = saved(default_model, tmp_path, with_processor(unigram(300), processor), limit=limit)
    tokenizer = engine.Tokenizer(model)
    assert tokenizer.encode(["a"]).sequences == 1
    said = f"^`inputs`: pairs cannot be encoded: {message}$"
    for encode in (tokenizer.encode_pairs, tokenizer.encode_known_pairs):
        with pytest.raises(InputError, match=said):
            encode(["a"], ["b"], TokenizeOptions(second_param="inputs"))


def test_texts_of_several_hypotheses_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = engine.Tokenizer(engine.load_model())
    counts: list[int] = []
    read = backend.Backend.read

    def counted(self: backend.Backend, texts: Sequence[str], *arguments: Any, **more: Any) -> Any:
        counts.append(len(texts))
        return read(self, texts, *arguments, **more)

    monkeypatch.setattr(backend.Backend, "read", counted)
    texts, hypotheses = ["a cat", "a dog " * 300], ["it is one", "it is two", "it is three"]
    options = TokenizeOptions(only_first=True)
    firsts = [text for text in texts for _ in hypotheses]
    together = tokenizer.encode_pairs(firsts, hypotheses * 2, options)
    assert counts == [2, 3]
    alone = [tokenizer.encode_pairs([text], hypotheses, options) for text in texts]
    assert together.ids.tolist() == [*alone[0].ids.tolist(), *alone[1].ids.tolist()]
    with pytest.raises(InputError, match="pair 3 has"):
        tokenizer.encode_pairs(firsts, hypotheses * 2, TokenizeOptions(only_first=True, truncate=False))
