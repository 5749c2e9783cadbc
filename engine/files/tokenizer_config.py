"""A tokenizer's settings in a checkpoint's JSON files, read as transformers 5 reads them.

transformers takes the vocabulary from tokenizer.json. Normalizer, pre-tokenizer, the model's other fields and the
template come from tokenizer.json too where the class is its generic one, TokenizersBackend (PreTrainedTokenizerFast in
version 4). Other classes make their own, by fields of tokenizer_config.json: CLASSES says how. Added tokens come from
`added_tokens_decoder`, or from tokenizer.json and the older files next to it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.files.json_files import Table, check_keys, read_object, read_optional
from embert.engine.files.key_tables import TOKENIZER, TOKENIZER_CONFIG

Fields = Mapping[str, Any]
Part = dict[str, Any]  # a component of tokenizer.json

# tokenizer_config.json writes "no limit" as a very large number of tokens.
NO_LENGTH_LIMIT = 1_000_000
ADDS = ("add_bos_token", "add_eos_token")
ATTRIBUTES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

# A `model_type` → the class that transformers takes where no file states one. Others get the generic class.
CLASS_OF_MODEL_TYPE = {
    "bert": "BertTokenizer",
    "distilbert": "BertTokenizer",
    "electra": "BertTokenizer",
    "nomic_bert": "BertTokenizer",
    "mpnet": "MPNetTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "jina_embeddings_v3": "XLMRobertaTokenizer",
    "gte": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
    "albert": "AlbertTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "gemma": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
}
# transformers ignores the tokenizer class in the files of these.
ALWAYS_GENERIC = ("modernbert", "mistral")
ALWAYS_OF_CLASS = {"qwen2": "Qwen2Tokenizer"}
GENERIC_CLASSES = ("BloomTokenizer", "FNetTokenizer", "ParakeetTokenizer", "PreTrainedTokenizer", "PythonBackend",
                   "PreTrainedTokenizerFast", "TokenizersBackend")  # fmt: skip
ALIASES = {
    **dict.fromkeys(("ElectraTokenizer", "LxmertTokenizer", "MobileBertTokenizer"), "BertTokenizer"),
    **dict.fromkeys(("BartTokenizer", "LEDTokenizer", "MvpTokenizer"), "RobertaTokenizer"),
}
# Further classes of transformers, which make something else of the files, or read others.
REFUSED_CLASSES = (
    "BarthezTokenizer", "BartphoTokenizer", "BertGenerationTokenizer", "BertJapaneseTokenizer", "BertweetTokenizer",
    "BigBirdTokenizer", "BioGptTokenizer", "BlenderbotSmallTokenizer", "BlenderbotTokenizer", "ByT5Tokenizer",
    "CLIPTokenizer", "CTRLTokenizer", "CanineTokenizer", "ClvpTokenizer", "CodeLlamaTokenizer", "CohereTokenizer",
    "CpmAntTokenizer", "CpmTokenizer", "DPRQuestionEncoderTokenizer", "DebertaTokenizer",
    "DiaTokenizer", "EsmTokenizer", "EsmcTokenizer", "FSMTTokenizer", "FastSpeech2ConformerTokenizer",
    "FlaubertTokenizer", "FunnelTokenizer", "GPT2Tokenizer", "GPTNeoXJapaneseTokenizer", "GPTNeoXTokenizer",
    "GPTSw3Tokenizer", "HerbertTokenizer", "LasrTokenizer", "LayoutLMv2Tokenizer",
    "LayoutLMv3Tokenizer", "LayoutXLMTokenizer", "LukeTokenizer", "M2M100Tokenizer",
    "MBart50Tokenizer", "MBartTokenizer", "MLukeTokenizer", "MarianTokenizer", "MarkupLMTokenizer",
    "MgpstrTokenizer", "MistralCommonBackend", "MyT5Tokenizer", "NllbTokenizer", "NougatTokenizer",
    "OpenAIGPTTokenizer", "PLBartTokenizer", "PegasusTokenizer", "PerceiverTokenizer", "PhobertTokenizer",
    "ProphetNetTokenizer", "Qwen3_5Tokenizer", "RagTokenizer", "ReformerTokenizer",
    "RemBertTokenizer", "RoCBertTokenizer", "RoFormerTokenizer", "SeamlessM4TTokenizer", "Siglip2Tokenizer",
    "SiglipTokenizer", "Speech2TextTokenizer", "SpeechT5Tokenizer", "SplinterTokenizer", "T5Tokenizer",
    "TapasTokenizer", "Tipsv2Tokenizer", "UdopTokenizer", "VideoPrismTokenizer", "VitsTokenizer",
    "Wav2Vec2CTCTokenizer", "Wav2Vec2PhonemeCTCTokenizer", "WhisperTokenizer", "XGLMTokenizer", "XLMTokenizer",
    "XLNetTokenizer",
)  # fmt: skip


class SpecialToken(NamedTuple):
    """An added token, special or not, by the library's names."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = True

    @classmethod
    def of(cls, path: Path, value: object, *, special: bool = True) -> SpecialToken:
        """Reads a text, or an object of a file. `special` is the default. Raises BrokenModel."""
        if isinstance(value, str):
            return cls(value, normalized=not special, special=special)
        if not isinstance(value, dict) or not isinstance(value.get("content"), str):
            raise BrokenModel(f"{path}: a token must be a text or an object with content, found {value!r}")
        special = bool(value.get("special", special))
        flags = {"normalized": not special, "special": special}
        flags |= {name: bool(value[name]) for name in FLAGS if name in value}
        return cls(value["content"], **flags)


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The settings in the files next to tokenizer.json. Built by `read_tokenizer_config`; picklable."""

    path: Path  # tokenizer_config.json, for messages
    kind: str = ""  # one of CLASSES; empty: tokenizer.json as it stands
    stated: bool = False  # a file names the class
    fields: Fields = field(default_factory=dict)
    special: Mapping[str, SpecialToken] = field(default_factory=dict)  # by names such as cls_token
    extra: tuple[SpecialToken, ...] = ()
    added: Mapping[int, SpecialToken] | None = None  # in place of tokenizer.json's; None: those
    older: Mapping[int, SpecialToken] = field(default_factory=dict)  # of added_tokens.json
    max_length: int | None = None  # tokens of a text
    truncation_side: Literal["right", "left"] | None = None  # None: as tokenizer.json says
    has_token_types: bool = True  # pairs are given token types
    splits_special_tokens: bool = False  # special tokens inside a text are plain text
    markers: tuple[str, ...] = ()  # texts before queries or documents, which mostly begin with a token
    adds: tuple[bool, bool] | None = None  # the template is bos_token, the text, eos_token; None: nothing states it


@dataclass(frozen=True, slots=True)
class TokenizerClass:
    """Class of transformers: it builds a tokenizer from a vocabulary and fields."""

    model: str  # the type of tokenizer.json's model
    parts: Callable[[TokenizerConfig, Part], dict[str, Part | None]]  # normalizer, pre_tokenizer, fields of the model
    template: Literal["bert", "roberta", "xlm-roberta"] | None
    special: dict[str, str]  # tokens where the files name none
    token_types: bool = False
    further: tuple[str, ...] = ()  # special tokens in addition to them
    mask_strips: bool = False  # the mask token takes the space before it
    normalizes: bool = False  # tokens that no file describes are looked for in the normalized text
    keeps_template: bool = False  # tokenizer.json's post-processor stays
    optional: bool = False  # special tokens may be null


def _word_piece(config: TokenizerConfig, _stored: Part) -> dict[str, Part | None]:
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": _flag(config, "tokenize_chinese_chars", True),
        "strip_accents": None if config.fields.get("strip_accents") is None else _flag(config, "strip_accents", True),
        "lowercase": _flag(config, "do_lower_case", True),
    }
    model = {**DEFAULTS["WordPiece"], "unk_token": config.special["unk_token"].content}
    return {"normalizer": normalizer, "pre_tokenizer": {"type": "BertPreTokenizer"}, "model": model}


def _byte_level(config: TokenizerConfig, _stored: Part) -> dict[str, Part | None]:
    model = {**DEFAULTS["BPE"], "continuing_subword_prefix": "", "end_of_word_suffix": ""}
    splitting = {"type": "ByteLevel", "add_prefix_space": _flag(config, "add_prefix_space", False)}
    return {"normalizer": None, "pre_tokenizer": {**DEFAULTS["ByteLevel"], **splitting}, "model": model}


def _metaspace(config: TokenizerConfig, with_space: str, without: str, *, split: bool = True) -> Part:
    """The pre-tokenizer of SentencePiece's classes. The first two are schemes by add_prefix_space."""
    scheme = with_space if _flag(config, "add_prefix_space", True) else without
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


def _unigram(config: TokenizerConfig, stored: Part, unknown: int) -> dict[str, Part | None]:
    steps = [{"type": "WhitespaceSplit"}, _metaspace(config, "always", "never")]
    return {
        "normalizer": _charsmap(stored),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {"unk_id": unknown, "byte_fallback": False},
    }


def _camembert(config: TokenizerConfig, stored: Part) -> dict[str, Part | None]:
    unknown = config.special["unk_token"].content
    vocabulary = stored["model"]["vocab"]
    return _unigram(config, stored, next((i for i, (token, _) in enumerate(vocabulary) if token == unknown), 0))


def _albert(config: TokenizerConfig, stored: Part) -> dict[str, Part | None]:
    steps: list[Part] = [{"type": "Replace", "pattern": {"String": quote}, "content": '"'} for quote in ("``", "''")]
    if not _flag(config, "keep_accents", False):
        steps += [{"type": "NFKD"}, {"type": "StripAccents"}]
    if _flag(config, "do_lower_case", True):
        steps.append({"type": "Lowercase"})
    charsmap = _charsmap(stored)
    steps += [charsmap] if charsmap else []
    return {**_unigram(config, stored, 1), "normalizer": {"type": "Sequence", "normalizers": steps}}


# Of DebertaV2Tokenizer: tokenizer.json's table of characters is not used.
DEBERTA_SPACES = r"\s{2,}|[\n\r\t]"


def _deberta(config: TokenizerConfig, stored: Part) -> dict[str, Part | None]:
    normalizers: list[Part] = [
        {"type": "Replace", "pattern": {"Regex": DEBERTA_SPACES}, "content": " "},
        {"type": "NFC"},
        {"type": "Strip", "strip_left": False, "strip_right": True},
    ]
    if _flag(config, "do_lower_case", False):
        normalizers.insert(0, {"type": "Lowercase"})
    metaspace = _metaspace(config, "always", "first")
    punctuation = {"type": "Punctuation", "behavior": "Isolated"}
    steps = [punctuation, metaspace] if _flag(config, "split_by_punct", False) else [metaspace]
    entry = [config.special["unk_token"].content, 0.0]
    vocabulary = stored["model"]["vocab"]
    unknown = vocabulary.index(entry) if entry in vocabulary else config.fields.get("unk_id", 1)
    if isinstance(unknown, bool) or not isinstance(unknown, int) or not 0 <= unknown < len(vocabulary):
        raise BrokenModel(f"{config.path}: unk_id must be the index of a token of tokenizer.json, found {unknown!r}")
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "model": {"unk_id": unknown, "byte_fallback": False},
    }


# Of Qwen2Tokenizer.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _qwen(config: TokenizerConfig, stored: Part) -> dict[str, Part | None]:
    bytes_of = {"type": "ByteLevel", "add_prefix_space": _flag(config, "add_prefix_space", False), "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": QWEN_PATTERN}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, {**DEFAULTS["ByteLevel"], **bytes_of}]},
        "model": _byte_level(config, stored)["model"],
    }


def _gemma(config: TokenizerConfig, _stored: Part) -> dict[str, Part | None]:
    unknown = config.special["unk_token"].content
    space = {"pattern": {"String": " "}}
    return {
        "normalizer": {"type": "Replace", **space, "content": "▁"},
        "pre_tokenizer": {"type": "Split", **space, "behavior": "MergedWithPrevious", "invert": False},
        "model": {**DEFAULTS["BPE"], "unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }


def _llama(config: TokenizerConfig, stored: Part) -> dict[str, Part | None]:
    scheme = "always" if _flag(config, "legacy", False) else "first"
    model = {**(_gemma(config, stored)["model"] or {}), "unk_token": None}
    return {"normalizer": None, "pre_tokenizer": _metaspace(config, scheme, "never", split=False), "model": model}


BERT_TOKENS = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
ROBERTA_TOKENS = {
    "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "sep_token": "</s>", "pad_token": "<pad>",
    "cls_token": "<s>", "mask_token": "<mask>",
}  # fmt: skip
CLASSES = {
    "BertTokenizer": TokenizerClass("WordPiece", _word_piece, "bert", BERT_TOKENS, token_types=True),
    "DistilBertTokenizer": TokenizerClass("WordPiece", _word_piece, "bert", BERT_TOKENS),
    "MPNetTokenizer": TokenizerClass(
        "WordPiece", _word_piece, "roberta", {**ROBERTA_TOKENS, "unk_token": "[UNK]"}, mask_strips=True, normalizes=True
    ),
    "RobertaTokenizer": TokenizerClass("BPE", _byte_level, "roberta", ROBERTA_TOKENS),
    "XLMRobertaTokenizer": TokenizerClass(
        "Unigram", lambda config, stored: _unigram(config, stored, 3), "xlm-roberta", ROBERTA_TOKENS
    ),
    "CamembertTokenizer": TokenizerClass(
        "Unigram",
        _camembert,
        "xlm-roberta",
        ROBERTA_TOKENS,
        further=("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"),
        mask_strips=True,
    ),
    "AlbertTokenizer": TokenizerClass(
        "Unigram",
        _albert,
        "bert",
        {**BERT_TOKENS, "unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "[CLS]", "eos_token": "[SEP]"},
        keeps_template=True,
    ),
    "DebertaV2Tokenizer": TokenizerClass(
        "Unigram", _deberta, "bert", {**BERT_TOKENS, "bos_token": "[CLS]", "eos_token": "[SEP]"}, token_types=True
    ),
    "Qwen2Tokenizer": TokenizerClass(
        "BPE",
        _qwen,
        None,
        dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
        keeps_template=True,
        optional=True,
    ),
    "GemmaTokenizer": TokenizerClass(
        "BPE",
        _gemma,
        None,
        {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")},
        keeps_template=True,
    ),
    "LlamaTokenizer": TokenizerClass(
        "BPE",
        _llama,
        None,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        keeps_template=True,
        optional=True,
    ),
}

# The fields of components that files may lack.
DEFAULTS: dict[str, Part] = {
    "BertNormalizer": {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
    "ByteLevel": {"add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "Metaspace": {"replacement": "▁", "prepend_scheme": "always", "split": True},
    "WordPiece": {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    "BPE": {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    },
    "Unigram": {"unk_id": None, "byte_fallback": False},
}


def read_tokenizer_config(
    folder: Path, config: Fields, overrides: Fields | None = None
) -> tuple[TokenizerConfig, tuple[str, ...]]:
    """Read the files next to the tokenizer.json in `folder`, and sentences for the start-up log.

    `config` are the fields of config.json; `overrides` replace fields of tokenizer_config.json, and are checked. Raises
    BrokenModel, and UnsupportedModel for a setting that the engine does not support, naming the field.
    """
    path, overrides = folder / "tokenizer_config.json", overrides or {}
    fields = read_optional(path)
    notices = check_tokenizer_keys(path, fields)
    class_name = fields.get("tokenizer_class") or config.get("tokenizer_class")
    fields = {**fields, **overrides}
    kind = _kind(path, class_name, str(config.get("model_type")))
    _rename_extra(fields)
    added = fields.get("added_tokens_decoder")
    map_path, older = folder / "special_tokens_map.json", dict[int, SpecialToken]()
    if added is None:
        if map_path.is_file():
            map_fields = read_object(map_path)
            notices += check_tokenizer_keys(map_path, map_fields)
            fields |= {name: value for name, value in map_fields.items() if not overrides.get(name)}
        older = _older(folder / "added_tokens.json", fields)
        if "extra_special_tokens" not in fields:
            _rename_extra(fields)
    elif not isinstance(added, dict) or not all(str(token_id).isdecimal() for token_id in added):
        raise BrokenModel(f"{path}: added_tokens_decoder must map ids to tokens, found {added!r}")
    side = fields.get("truncation_side")
    if side not in (None, "right", "left"):
        raise BrokenModel(f"{path}: truncation_side must be 'right' or 'left', found {side!r}")
    own = CLASSES.get(kind)
    names = fields.get("model_input_names")
    return TokenizerConfig(
        path=path,
        kind=kind,
        stated=class_name is not None and str(class_name) not in GENERIC_CLASSES,
        fields=fields,
        special=_named_tokens(path, fields, own),
        extra=_extra_tokens(path, fields, own),
        added=None
        if added is None
        else {int(token_id): SpecialToken.of(path, token, special=False) for token_id, token in added.items()},
        older=older,
        max_length=_max_length(fields),
        truncation_side=cast(Literal["right", "left"] | None, side),
        has_token_types=own is not None and own.token_types if names is None else "token_type_ids" in names,
        splits_special_tokens=bool(fields.get("split_special_tokens")),
        adds=(bool(overrides.get(ADDS[0])), bool(overrides.get(ADDS[1]))) if overrides.keys() & {*ADDS} else None,
    ), notices


def _kind(path: Path, class_name: object, model_type: str) -> str:
    """The key of CLASSES, or "" for the generic class, chosen as AutoTokenizer does. Raises UnsupportedModel."""
    if model_type in ALWAYS_GENERIC:
        return ""
    if model_type in ALWAYS_OF_CLASS:
        return ALWAYS_OF_CLASS[model_type]
    name = CLASS_OF_MODEL_TYPE.get(model_type, "") if class_name is None else str(class_name)
    name = name if name in GENERIC_CLASSES else name.removesuffix("Fast")
    name = ALIASES.get(name, name)
    if name in REFUSED_CLASSES:
        raise UnsupportedModel(
            f"{path}: tokenizer_class {class_name} is not supported; supported: {', '.join((*CLASSES, *ALIASES))}, and "
            "PreTrainedTokenizerFast, which takes tokenizer.json as it stands"
        )
    return name if name in CLASSES else ""


def check_tokenizer_keys(path: Path, fields: Fields, table: Table = TOKENIZER_CONFIG) -> tuple[str, ...]:
    """Check the keys of a file. Any further name of a token is one key of the table."""
    keys = {"*_token" if _is_further(name, value) else name: value for name, value in fields.items()}
    return check_keys(path, keys, table)


def _is_further(name: str, value: object) -> bool:
    """True for a special token with a custom name."""
    return name.endswith("_token") and name not in ATTRIBUTES and isinstance(value, str)


def _rename_extra(fields: dict[str, Any]) -> None:
    """transformers 4's name of further special tokens to that of version 5."""
    if "additional_special_tokens" in fields and not fields.get("extra_special_tokens"):
        fields["extra_special_tokens"] = fields.pop("additional_special_tokens")


def _named_tokens(path: Path, fields: Fields, own: TokenizerClass | None) -> dict[str, SpecialToken]:
    """The special tokens that have a name, in the library's order."""
    values = {name: fields[name] for name in ATTRIBUTES if name in fields}
    usual = {} if own is None else own.special
    for name, value in values.items():
        if value is None and name in usual and (own is None or not own.optional):
            raise UnsupportedModel(f"{path}: {name} null is not supported for this class; supported: a token")
    tokens = {}
    for name in ATTRIBUTES:
        value = values.get(name, usual.get(name))
        if value is not None:
            tokens[name] = SpecialToken.of(path, value)
            if isinstance(value, str) and own is not None:
                strips = own.mask_strips and name == "mask_token"
                tokens[name] = tokens[name]._replace(lstrip=strips, normalized=own.normalizes)
    more = {name: value for name, value in fields.items() if _is_further(name, value)}
    for name in ("extra_special_tokens", "model_specific_special_tokens"):
        more |= fields[name] if isinstance(fields.get(name), dict) else {}
    return tokens | {name: SpecialToken.of(path, value) for name, value in more.items()}


def _extra_tokens(path: Path, fields: Fields, own: TokenizerClass | None) -> tuple[SpecialToken, ...]:
    extra = fields.get("extra_special_tokens")
    if extra is None or isinstance(extra, dict):
        extra = () if own is None else own.further
    elif not isinstance(extra, list):
        raise BrokenModel(f"{path}: extra_special_tokens must be a list or an object, found {extra!r}")
    return tuple(SpecialToken.of(path, value) for value in extra)


def _older(path: Path, fields: Fields) -> dict[int, SpecialToken]:
    if not path.is_file():
        return {}
    stored = read_object(path)
    if not all(isinstance(token_id, int) for token_id in stored.values()):
        raise BrokenModel(f"{path} must map tokens to ids")
    extra = fields.get("extra_special_tokens")
    values = [*(fields.get(name) for name in ATTRIBUTES), *(extra if isinstance(extra, list) else ())]
    special = {value["content"] if isinstance(value, dict) else value for value in values}
    return {token_id: SpecialToken.of(path, token, special=token in special) for token, token_id in stored.items()}


def _max_length(fields: Fields) -> int | None:
    length = fields.get("model_max_length", fields.get("max_len"))
    if isinstance(length, (int, float)) and 0 < length < NO_LENGTH_LIMIT:
        return int(length)
    return None


def _flag(config: TokenizerConfig, name: str, usual: bool) -> bool:
    value = config.fields.get(name, usual)
    if not isinstance(value, bool):
        raise BrokenModel(f"{config.path}: {name} must be true or false, found {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Definition:
    """A tokenizer as transformers makes it: tokenizer.json with what the other files replace in it."""

    description: Part  # as tokenizer.json has it, but for `tokens`
    tokens: tuple[
        SpecialToken, ...
    ]  # all added tokens, in the order in which they get ids; of generic classes new ones
    is_generic: bool = True  # the description is tokenizer.json's own
    replaced: tuple[str, ...] = ()  # components that are not tokenizer.json's
    template: Literal["bert", "roberta", "xlm-roberta", "stated"] | None = None  # in place of the post-processor


def define(path: Path, stored: Part, config: TokenizerConfig) -> tuple[Definition, tuple[str, ...]]:
    """Join a parsed tokenizer.json, `stored`, with the other files, and sentences for the start-up log.

    Raises BrokenModel or UnsupportedModel for a tokenizer.json that is not the class's.
    """
    notices = check_keys(path, stored, TOKENIZER)
    if config.kind == "LlamaTokenizer" and _has_bytes(stored):  # Llama 3's, whose files name the class of Llama 2
        usual = CLASSES[config.kind].special
        special = {name: token for name, token in config.special.items() if name in config.fields or name not in usual}
        config = dataclasses.replace(config, kind="", special=special)
    own = CLASSES.get(config.kind)
    tokens = tuple(_added_tokens(path, stored, config))
    keeps = own is None or own.keeps_template
    own_template: Literal["stated"] | None = "stated" if keeps and config.adds is not None else None
    if keeps and own_template is None:
        notices += _contradictions(path, stored, config)
    if own is None:
        return Definition(stored, tokens, template=own_template), notices
    model = stored.get("model")
    kind = _model_type(model) if isinstance(model, dict) and "vocab" in model else None
    if kind != own.model and config.stated:
        raise UnsupportedModel(
            f"{config.path}: tokenizer_class {config.kind} is for a model of type {own.model}, {path} has {kind}; "
            "supported: tokenizer_class PreTrainedTokenizerFast, which takes tokenizer.json as it stands"
        )
    if kind != own.model or kind is None:
        notice = f"{path} is taken as it stands: no tokenizer_class is stated, and {config.kind} is for {own.model}"
        return Definition(stored, tokens, template="stated" if config.adds else None), (*notices, notice)
    parts = own.parts(config, stored)
    replaced = tuple(
        name
        for name, part in parts.items()
        if (_fields_of(stored["model"], kind, part) if name == "model" else _canonical(stored.get(name)))
        != (_fields_of(part, kind, part) if name == "model" else _canonical(part))
    )
    description = {**stored, **parts, "model": {**stored["model"], "type": kind, **(parts["model"] or {})}}
    if replaced:
        notices += (
            f"{path}: its {' and its '.join(replaced)} {'is' if len(replaced) == 1 else 'are'} not used: as in "
            f"transformers 5, {config.kind} makes its own by {config.path.name}",
        )
    template = None if own.keeps_template and stored.get("post_processor") else own.template
    return Definition(description, tokens, False, replaced, own_template or template), notices


def _contradictions(path: Path, stored: Part, config: TokenizerConfig) -> tuple[str, ...]:
    """Sentences where tokenizer_config.json states special tokens that tokenizer.json's template lacks, or the reverse.

    transformers 4 obeyed the former, transformers 5 takes the latter.
    """
    template = stored.get("post_processor") or {}
    steps = [step for step in template.get("processors", [template]) if step.get("type") == "TemplateProcessing"]
    if not steps:
        return ()
    added = {piece["SpecialToken"]["id"] for step in steps for piece in step["single"] if "SpecialToken" in piece}
    sentences = []
    for name in ADDS:
        token, flag = config.special.get(name.removeprefix("add_")), config.fields.get(name)
        if token is not None and isinstance(flag, bool) and flag != (token.content in added):
            sentences.append(
                f"{config.path}: {name} {json.dumps(flag)} has no effect, as in transformers 5: the template of "
                f"{path.name} {'does not add' if flag else 'adds'} {token.content}; if the model was trained otherwise "
                f"state {' and '.join(ADDS)} in processor_kwargs of sentence_bert_config.json"
            )
    return tuple(sentences)


def _has_bytes(stored: Part) -> bool:
    """True if a component of tokenizer.json is of the type ByteLevel."""
    return '"ByteLevel"' in json.dumps([stored.get(name) for name in ("pre_tokenizer", "post_processor", "decoder")])


def _added_tokens(path: Path, stored: Part, config: TokenizerConfig) -> Iterable[SpecialToken]:
    """The added tokens in transformers' order: by their ids, then those that have none yet."""
    own = stored.get("added_tokens") or []
    by_id = {entry["id"]: SpecialToken.of(path, entry, special=False) for entry in own}
    tokens = {**config.older, **by_id} if config.added is None else config.added
    known = {token.content: token for token in tokens.values()}
    names = {token.content for token in config.special.values()}
    new = {token.content: known.get(token.content, token) for token in (*config.special.values(), *config.extra)}
    # The generic class keeps tokenizer.json's other tokens.
    present = set(known) | (set() if config.kind else {token.content for token in by_id.values()})
    for _, token in sorted(tokens.items()):
        yield token._replace(special=token.special or token.content in names)
    yield from (token for content, token in new.items() if content not in present)


def _model_type(model: Part) -> str:
    """Old files lack the type."""
    usual = "BPE" if "merges" in model else "Unigram" if isinstance(model["vocab"], list) else "WordPiece"
    return str(model.get("type", usual))


def _fields_of(model: Part | None, kind: str, names: Iterable[str] | None) -> Part:
    """The model's fields of these names; an empty text is none."""
    fields = {**DEFAULTS[kind], **(model or {})}
    return {name: None if fields.get(name) == "" else fields.get(name) for name in names or ()}


def _canonical(part: Part | None) -> Any:
    """A component in a form that is equal for components that do the same."""
    if part is None:
        return []
    kind = part.get("type")
    if kind == "Sequence":
        members = part.get("normalizers") or part.get("pretokenizers") or []
        return [leaf for member in members for leaf in _canonical(member)]
    part = {**DEFAULTS.get(str(kind), {}), **part}
    if kind == "Metaspace":
        if not part.pop("add_prefix_space", True):
            part["prepend_scheme"] = "never"
        part.pop("str_rep", None)
    if kind == "ByteLevel":
        part.pop("trim_offsets")
    return [part]


def _charsmap(stored: Part) -> Part | None:
    """tokenizer.json's table of characters, which SentencePiece's classes keep."""
    steps = (step for step in _canonical(stored.get("normalizer")) if step.get("type") == "Precompiled")
    return next((step for step in steps if step.get("precompiled_charsmap")), None)
