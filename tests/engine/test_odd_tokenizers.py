"""Tokenizers that are broken or leave texts without tokens: refused at load or by text, else equal transformers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers, processors

from embert import engine
from embert.engine.errors import BrokenModel, InputError
from embert.engine.model import Model
from tests.engine.conftest import AS_IT_STANDS

FAST: Any = transformers.PreTrainedTokenizerFast  # which has no types
MARKS = ("<s>", "</s>", "<unk>", "<pad>")
WORDS = ("a", "the", "cat", "x", "##at", "\u2581cat", "\u0120cat", "c", "t", "\u2581", "\u0120")
TEXTS = ["a cat", "the cat x", "", " ", "unknown", "zzz cat", "\u00e9", "CAT \x00", "c a t"]


def vocabulary(size: int = 16) -> dict[str, int]:
    names = [*MARKS, *WORDS]
    return {name: number for number, name in enumerate([*names, *(f"w{n}" for n in range(size))][:size])}


def library(kind: str, *, without: tuple[str, ...] = (), framed: bool = True) -> Library:
    """A tokenizer of 16 tokens or fewer; `framed`: with special tokens around texts."""
    tokens = {token: number for token, number in vocabulary().items() if token not in without}
    unknown = None if "<unk>" in without else "<unk>"
    if kind == "WordLevel":
        made = Library(models.WordLevel(tokens, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
    elif kind == "WordPiece":
        made = Library(models.WordPiece(tokens, unk_token="<unk>"))
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    elif kind == "Unigram":
        made = Library(
            models.Unigram([(token, -1.0 - n) for n, token in enumerate(tokens)], None if unknown is None else 2)
        )
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    elif kind == "byte-level BPE":
        made = Library(models.BPE(tokens, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        made = Library(models.BPE(tokens, [], unk_token=unknown))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if framed:
        made.post_processor = processors.TemplateProcessing(
            "<s> $A </s>", "<s> $A </s> </s> $B </s>", [("<s>", 0), ("</s>", 1)]
        )
    return made


KINDS = ("WordLevel", "WordPiece", "Unigram", "byte-level BPE", "BPE")


@pytest.fixture
def loaded(default_model: Model, tmp_path: Path) -> Callable[..., engine.Tokenizer]:
    """Loads a tokenizer for a model of 16 embeddings. `change` changes its parsed file first."""

    def load(made: Library, change: Callable[[Any], None] | None = None) -> engine.Tokenizer:
        description = json.loads(made.to_str())
        if change is not None:
            change(description)
        (tmp_path / "tokenizer.json").write_text(json.dumps(description))
        config = dataclasses.replace(default_model.config, vocab_size=16)
        model = dataclasses.replace(
            default_model, folder=tmp_path, transformer="", max_input_length=9, config=config, tokenizer=AS_IT_STANDS
        )
        return engine.Tokenizer(model)

    return load


def expected(tmp_path: Path, text: str) -> list[int]:
    fast = FAST(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ids: list[int] = fast(text, truncation=True, max_length=9)["input_ids"]
    return ids


def refusal(encode: Callable[[list[str]], Any], texts: list[str]) -> str:
    """The error for texts that are refused, or an empty string."""
    try:
        encode(texts)
    except InputError as error:
        return f"{error.kind}: {error}"
    return ""


def check_against_transformers(tokenizer: engine.Tokenizer, tmp_path: Path, texts: list[str]) -> list[bool]:
    """Asserts that each text has transformers' ids, or is refused by its index."""
    refused = []
    for text in texts:

        def encode(texts: list[str]) -> engine.Encoded:
            return tokenizer.encode(texts)

        for each in (encode, tokenizer.tokenize):
            said = refusal(each, [tokenizer.probe, text])
            assert not said or said.startswith("tokenizer: `inputs`: text 1 ")
        refused.append(bool(refusal(encode, [text])))
        if not refused[-1]:
            assert encode([text]).ids.tolist() == expected(tmp_path, text)
    return refused


@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize("without", [(), ("a",), ("a", "x", "c", "t", "##at"), ("<unk>",), ("<unk>", "a")])
@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_without_some_tokens(
    loaded: Callable[..., engine.Tokenizer], tmp_path: Path, kind: str, without: tuple[str, ...], framed: bool
) -> None:
    made = library(kind, without=without, framed=framed)
    if kind == "byte-level BPE" and "x" in without:
        with pytest.raises(BrokenModel, match="makes no token of any letter"):
            loaded(made)
        return
    tokenizer = loaded(made)
    refused = check_against_transformers(tokenizer, tmp_path, TEXTS)
    if framed and "<unk>" not in without:
        assert not any(refused)
    if not framed:
        assert refused[2], "a text without tokens"


@pytest.mark.parametrize("kind", KINDS)
def test_normalizer_that_deletes_everything_but_a_word(
    loaded: Callable[..., engine.Tokenizer], tmp_path: Path, kind: str
) -> None:
    made = library(kind)
    made.normalizer = normalizers.Replace("a", "")
    tokenizer = loaded(made)
    assert not any(check_against_transformers(tokenizer, tmp_path, ["a", "aaa", "a cat", "x a x"]))
    pairs = tokenizer.encode_pairs(["a", "x"], ["a", "a x"])
    assert pairs.lengths.min() >= 4


def delete_everything(description: Any) -> None:
    description["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[\\s\\S]"}, "content": ""}


def panic(description: Any) -> None:
    description["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": ""}


def hole(description: Any) -> None:
    vocabulary = description["model"]["vocab"]
    if isinstance(vocabulary, dict):
        vocabulary["cat"] = 40
    else:
        vocabulary += [["w", -9.0]] * 30


def special(template: str) -> Callable[[Any], None]:
    def change(description: Any) -> None:
        processor = description["post_processor"]
        processor["special_tokens"]["<pad>"] = {"id": "<pad>", "ids": [99], "tokens": ["<pad>"]}
        processor[template].append({"SpecialToken": {"id": "<pad>", "type_id": 0}})

    return change


def added(description: Any) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number in range(16, 18):
        token = {"id": number, "content": f"[new{number}]", "special": number % 2 == 0, **flags}
        description["added_tokens"].append(token)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (delete_everything, "makes no token of any letter"),
        (panic, "is not a tokenizer that can be read"),
        (hole, "; the model has embeddings for ids 0 to 15"),
        (added, "; the model has embeddings for ids 0 to 15"),
        (special("single"), "the token '<pad>' has the id 99; the model has embeddings for ids 0 to 15"),
        (special("pair"), "the token '<pad>' has the id 99; the model has embeddings for ids 0 to 15"),
        (lambda description: description["model"].update(vocab={}), "tokenizer.json"),
        (lambda description: description.update(model=None), "tokenizer.json"),
    ],
)
def test_what_is_found_at_load(
    loaded: Callable[..., engine.Tokenizer], kind: str, change: Callable[[Any], None], said: str
) -> None:
    with pytest.raises(BrokenModel, match=said):
        loaded(library(kind), change)
