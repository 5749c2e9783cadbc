"""Tokenizers as the files next to tokenizer.json state them: ids and token types are those of AutoTokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers.models.auto import tokenization_auto

from embert import engine
from embert.engine.files.tokenizer_config import (
    ALIASES,
    CLASS_OF_MODEL_TYPE,
    CLASSES,
    GENERIC_CLASSES,
    REFUSED_CLASSES,
    define,
    read_tokenizer_config,
)
from embert.engine.tokenization.backend import Backend as OurBackend
from embert.engine.tokenization.library import load_library
from tests.engine.checkpoints import SPECIAL, byte_level, check, unigram, word_piece, write

AUTO: Any = transformers.AutoTokenizer
TEXTS = [
    "hello world", "Hello World", "café é", "中国 中", "a [MASK] b", "a <mask> b", " hello", "``x'' cat", "",
    "new new2 NEW", "xnewx", "[CLS] x </s>", " a\n\tb  c\u3000 \n", "a\nb, c!? 日本 \U0001f600 ",
]  # fmt: skip
ROOM = 300  # rows of the word table: more than any tokenizer here has


def added(content: str, **flags: bool) -> dict[str, Any]:
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": content, **usual, **flags}


KINDS = {
    "bert": word_piece,
    "cased": lambda: word_piece(lowercase=False, strip_accents=False),
    "byte-level": byte_level,
    "unigram": unigram,
}
NEW = {"0": added("[PAD]", special=True), "2": added("[CLS]", special=True), "150": added("new", normalized=True)}
# model_type, a kind of tokenizer, tokenizer_config.json (None: no such file), and further files.
CASES: list[tuple[str, str, dict[str, Any] | None, dict[str, Any]]] = [
    ("bert", "bert", None, {}),
    ("bert", "cased", {}, {}),
    ("bert", "cased", {"do_lower_case": False}, {}),
    ("bert", "bert", {"do_lower_case": False, "strip_accents": True}, {}),
    ("bert", "bert", {"tokenize_chinese_chars": False, "strip_accents": False}, {}),
    ("bert", "cased", {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": True}, {}),
    ("bert", "bert", {"tokenizer_class": "TokenizersBackend", "mask_token": "new"}, {}),
    ("bert", "bert", {"tokenizer_class": "NoSuchTokenizer", "additional_special_tokens": ["new", "new2"]}, {}),
    ("bert", "cased", {"tokenizer_class": "ElectraTokenizerFast"}, {}),
    ("bert", "bert", {"tokenizer_class": "DistilBertTokenizer", **SPECIAL}, {}),
    ("bert", "bert", {"tokenizer_class": "MPNetTokenizer"}, {}),
    ("bert", "bert", {"tokenizer_class": "MPNetTokenizer", "cls_token": "[CLS]", "mask_token": "[MASK]"}, {}),
    ("bert", "bert", {"cls_token": "hello", "sep_token": {"__type": "AddedToken", **added("world")}}, {}),
    ("bert", "bert", {"added_tokens_decoder": NEW}, {}),
    ("bert", "bert", {"added_tokens_decoder": NEW, "tokenizer_class": "PreTrainedTokenizerFast"}, {}),
    ("bert", "bert", {"extra_special_tokens": ["new"], "split_special_tokens": True}, {}),
    ("bert", "bert", {"extra_special_tokens": {"image_token": "new"}, "audio_token": "NEW"}, {}),
    ("bert", "bert", {}, {"special_tokens_map.json": {"cls_token": "cat", "additional_special_tokens": ["new"]}}),
    ("bert", "bert", {}, {"special_tokens_map.json": {"mask_token": {**added("new", lstrip=True), "special": True}}}),
    ("bert", "bert", {}, {"added_tokens.json": {"new": 120, "more": 119}}),
    ("bert", "bert", {"model_input_names": ["input_ids", "attention_mask"]}, {}),
    ("distilbert", "cased", {}, {}),
    ("electra", "bert", {"do_lower_case": False}, {}),
    ("mpnet", "bert", {"do_lower_case": False, "pad_token": "[PAD]"}, {}),
    ("nomic_bert", "cased", None, {}),
    ("modernbert", "cased", {"tokenizer_class": "BertTokenizer"}, {}),
    ("roberta", "byte-level", None, {}),
    ("roberta", "byte-level", {"add_prefix_space": True, "trim_offsets": False}, {}),
    ("roberta", "byte-level", {"cls_token": "he", "tokenizer_class": "RobertaTokenizerFast"}, {}),
    ("roberta", "byte-level", {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True}, {}),
    ("xlm-roberta", "unigram", None, {}),
    ("xlm-roberta", "unigram", {"add_prefix_space": False, "eos_token": "[SEP]"}, {}),
    ("xlm-roberta", "unigram", {"tokenizer_class": "PreTrainedTokenizerFast"}, {}),
    ("camembert", "unigram", {"unk_token": "▁"}, {}),
    ("albert", "unigram", {"do_lower_case": False}, {}),
    ("albert", "unigram", {"keep_accents": True, "pad_token": "<pad>", "add_prefix_space": False}, {}),
    ("gte", "unigram", {}, {}),
    ("deberta-v2", "unigram", None, {}),
    ("deberta-v2", "unigram", {"tokenizer_class": "DebertaV2TokenizerFast", "do_lower_case": True}, {}),
    ("deberta-v2", "unigram", {"split_by_punct": True, "add_prefix_space": False, "unk_token": "<unk>"}, {}),
    ("deberta-v2", "unigram", {"unk_token": "▁", "unk_id": 2, "sep_token": "</s>"}, {}),
    ("deberta-v2", "unigram", {"tokenizer_class": "PreTrainedTokenizerFast"}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "kind", "config", "files"), CASES, ids=str)
def test_ids_are_those_of_transformers(
    tmp_path: Path, model_type: str, kind: str, config: dict[str, Any] | None, files: dict[str, Any]
) -> None:
    check_ids(tmp_path, model_type, kind, config, files, {})


GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "[CLS]", "eos_token": "[SEP]"}
BOTH = {"add_bos_token": True, "add_eos_token": True}
# model_type, a kind of tokenizer, tokenizer_config.json, and processor_kwargs of sentence_bert_config.json.
ARGUMENTS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("bert", "bert", {}, BOTH),
    ("bert", "bert", {}, {"strip_accents": False, "tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "hello"}),
    ("roberta", "byte-level", {}, {"add_eos_token": True, "add_prefix_space": True}),
    ("albert", "unigram", {}, {"add_eos_token": True, "keep_accents": True}),
    ("llama", "bert", GENERIC, BOTH),
    ("llama", "bert", GENERIC, {"add_eos_token": True, "eos_token": "hello"}),
    ("llama", "bert", GENERIC, {"add_bos_token": None}),
    ("llama", "bert", GENERIC, {**BOTH, "eos_token": None}),
    ("llama", "byte-level", {**GENERIC, "tokenizer_class": "LlamaTokenizer"}, {"extra_special_tokens": {"a": "ll"}}),
    ("qwen3", "byte-level", {"eos_token": "he"}, BOTH),
]


@pytest.mark.parametrize(("model_type", "kind", "config", "arguments"), ARGUMENTS, ids=str)
def test_arguments_are_obeyed_as_by_transformers(
    tmp_path: Path, model_type: str, kind: str, config: dict[str, Any], arguments: dict[str, Any]
) -> None:
    check_ids(tmp_path, model_type, kind, config, {}, arguments)


def test_arguments_that_are_refused(tmp_path: Path) -> None:
    for name, value in {"tokenizer_file": "../a.json", "vocab": {}, "tokenizer_type": "bert"}.items():
        folder = write(tmp_path / name, files={"sentence_bert_config.json": {"tokenizer_args": {name: value}}})
        check(folder, refusal=f"tokenizer_args: {name} {value!r} is not supported")


def test_flags_that_contradict_the_template_are_a_notice(tmp_path: Path) -> None:
    """transformers 4 obeyed add_eos_token of tokenizer_config.json, transformers 5 takes the template as it stands."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**GENERIC, "eos_token": "cat", **BOTH}))
    stored = json.loads(word_piece().to_str())
    for arguments, expected in (({}, 1), ({"add_eos_token": True}, 0)):
        config, _ = read_tokenizer_config(tmp_path, {"model_type": "llama"}, arguments)
        _, notices = define(tmp_path / "tokenizer.json", stored, config)
        assert [notice for notice in notices if "add_eos_token true" in notice] == [*notices]
        assert len(notices) == expected


def check_ids(
    tmp_path: Path,
    model_type: str,
    kind: str,
    config: dict[str, Any] | None,
    files: dict[str, Any],
    arguments: dict[str, Any],
) -> None:
    """Compare the tokenizer of a folder with the one that transformers makes with these arguments."""
    tokenizer = KINDS[kind]()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in {"tokenizer_config.json": config, **files}.items():
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    reference = AUTO.from_pretrained(tmp_path, **arguments)
    ours, notices = read_tokenizer_config(tmp_path, {"model_type": model_type}, arguments)
    assert notices == ()
    path = tmp_path / "tokenizer.json"
    library, _ = load_library(path, ours, vocab_size=ROOM, lowercase=False)
    expected = reference(TEXTS)
    assert [each.ids for each in library.encode_batch(TEXTS)] == expected["input_ids"]
    pairs = [(first, second) for first in TEXTS[:2] for second in TEXTS]
    expected = reference([first for first, _ in pairs], [second for _, second in pairs])
    found = library.encode_batch(pairs)
    assert [each.ids for each in found] == expected["input_ids"]
    assert ours.has_token_types == ("token_type_ids" in expected)
    if ours.has_token_types:
        assert [each.type_ids for each in found] == expected["token_type_ids"]
    # The code that splits texts and the word cache use the same tokenizer.
    backend = OurBackend(path, ours, vocab_size=ROOM, lowercase=False)
    for text in TEXTS:
        (ids,) = backend.ids([text], None, "right")
        assert ids == backend.library_ids([text])[0]


def test_tokenizer_of_the_class_is_taken_as_it_stands(tmp_path: Path) -> None:
    """Nothing is said of it, and nothing is made again."""
    for model_type, tokenizer in (("bert", word_piece()), ("roberta", byte_level(trim_offsets=True))):
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        config, _ = read_tokenizer_config(tmp_path, {"model_type": model_type})
        definition, notices = define(
            tmp_path / "tokenizer.json", json.loads((tmp_path / "tokenizer.json").read_text()), config
        )
        assert (definition.replaced, notices) == ((), ())


def test_what_a_class_replaces_is_a_notice(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", tokenizer=word_piece(lowercase=False))
    (notice,) = engine.load_model(str(folder)).notices
    assert f"{folder / 'tokenizer.json'}: its normalizer is not used" in notice
    assert "BertTokenizer" in notice


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer_class": "BertJapaneseTokenizer"}, "tokenizer_class BertJapaneseTokenizer is not supported"),
        ({"tokenizer_class": "XLMRobertaTokenizer"}, "XLMRobertaTokenizer is for a model of type Unigram"),
        ({"do_lower_case": "yes"}, "do_lower_case must be true or false, found 'yes'"),
        ({"truncation_side": "top"}, "truncation_side must be 'right' or 'left', found 'top'"),
        ({"cls_token": None}, "cls_token null is not supported"),
        ({"cls_token": 3}, "a token must be a text or an object with content, found 3"),
        ({"added_tokens_decoder": {"one": {}}}, "added_tokens_decoder must map ids to tokens"),
        ({"fast_tokenizer_files": ["tokenizer.4.0.json"]}, "fast_tokenizer_files"),
        ({"init_inputs": [1]}, "init_inputs [1]"),
    ],
    ids=str,
)
def test_fields_that_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    check(write(tmp_path / "a", files={"tokenizer_config.json": fields}), refusal=message)


@pytest.mark.parametrize("where", ["tokenizer_config.json", "tokenizer.json", "processor_kwargs"])
def test_end_that_is_cut_off(tmp_path: Path, where: str) -> None:
    tokenizer, files = word_piece(), dict[str, Any]()
    if where == "tokenizer.json":
        tokenizer.enable_truncation(99, direction="left")
    if where == "tokenizer_config.json":
        files[where] = {"truncation_side": "left"}
    stated = {"processor_kwargs": {"truncation_side": "left"}} if where == "processor_kwargs" else {}
    files["sentence_bert_config.json"] = {"max_seq_length": 16, **stated}
    check(write(tmp_path / "a", tokenizer=tokenizer, files=files))


def test_tokens_that_have_no_embedding_are_text(tmp_path: Path) -> None:
    """Only files next to tokenizer.json have them; transformers fails for texts that spell them out."""
    folder = write(tmp_path / "a", files={"tokenizer_config.json": {"additional_special_tokens": ["hello world"]}})
    model = engine.load_model(str(folder))
    assert engine.Tokenizer(model).encode(["hello world"]).tokens == 4


def test_every_class_of_transformers_is_known() -> None:
    for name in {*tokenization_auto.TOKENIZER_MAPPING_NAMES.values()} - {None}:
        name = str(name).removesuffix("Fast")
        found = tokenization_auto.tokenizer_class_from_name(name)
        if found is None:
            assert name in (*REFUSED_CLASSES, *GENERIC_CLASSES), name
        elif found is transformers.TokenizersBackend or "__init__" not in vars(found):
            assert name in GENERIC_CLASSES, name
        else:
            assert (name in REFUSED_CLASSES) != (ALIASES.get(name, name) in CLASSES), name
    for model_type, name in CLASS_OF_MODEL_TYPE.items():
        assert tokenization_auto.TOKENIZER_MAPPING_NAMES[model_type] == name
