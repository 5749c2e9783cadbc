"""The tables of keys beside the installed libraries: every key that these read has a row, and readers use the rows."""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sentence_transformers
import tokenizers
import transformers
from sentence_transformers.base.modules import Module, Transformer
from transformers import tokenization_utils_base, tokenization_utils_tokenizers
from transformers.models.auto import tokenization_auto

from docs.key_tables import PAGE, replaced
from embert import engine
from embert.engine.errors import UnsupportedModel
from embert.engine.files.json_files import check_keys, refused
from embert.engine.files.key_tables import (
    CONFIG,
    CONFIG_OF_MODEL_TYPE,
    MODULE_CONFIGS,
    PROCESSING_KWARGS,
    REFUSED_MODULES,
    SENTENCE_BERT_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from tests.engine.conftest import BuildBert
from tests.engine.model_cases import MODEL_CASES
from tests.server.models import edit_json

# sentence-transformers 5.1 and transformers 4.57, which are not installed, read these too.
OLDER = {
    "sentence_bert_config.json": {
        "max_seq_length", "do_lower_case", "model_args", "tokenizer_args", "config_args", "cache_dir", "backend",
        "tokenizer_name_or_path",
    },
    "config.json": {
        "position_embedding_type", "pruned_heads", "torchscript", "use_bfloat16", "tf_legacy_loss", "torch_dtype",
        "cross_attention_hidden_size", "num_labels", "tokenizer_class", "prefix", "attn_implementation",
    },
    "tokenizer_config.json": {
        "do_basic_tokenize", "never_split", "wordpieces_prefix", "clean_text", "sp_model_kwargs", "errors",
        "remove_space", "additional_special_tokens", "from_slow", "trim_offsets",
    },
}  # fmt: skip
# Arguments of the libraries' functions, which stand in no file.
ARGUMENTS = {
    "_from_auto", "_from_pipeline", "_json_padding", "_json_truncation", "_spm_precompiled_charsmap", "code_revision",
    "commit_message", "config", "force_download", "max_target_length", "merges", "mistral_format", "post_processor",
    "proxies", "repo_id", "sanitize_control_tokens", "save_jinja_files", "tokenizer", "tokenizer_object",
    "tokenizer_padding", "tokenizer_truncation", "tokenizer_type", "trust_remote_code", "unk_id",
    "use_source_tokenizer", "vocab", "self", "args", "kwargs", "slow_tokenizer_class", "device_map",
    "end_of_word_suffix", "continuing_subword_prefix", "initial_alphabet",
}  # fmt: skip


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def keys_in(module: ModuleType, *names: str) -> set[str]:
    """The literal keys that a module's code takes from dictionaries of these names."""
    named = "|".join(names)
    source = inspect.getsource(module)
    return {
        *re.findall(rf'\b(?:{named})\.(?:pop|get|setdefault)\(\s*"(\w+)"', source),
        *re.findall(rf'\b(?:{named})\["(\w+)"\]', source),
    }


def modules_of_sentence_transformers() -> Iterator[type[Module]]:
    for info in pkgutil.walk_packages(sentence_transformers.__path__, "sentence_transformers."):
        if ".modules" in info.name and ".tokenizer" not in info.name:
            for found in vars(import_module(info.name)).values():
                if inspect.isclass(found) and issubclass(found, Module) and not inspect.isabstract(found):
                    yield found


def test_every_module_of_sentence_transformers_is_known() -> None:
    found = {module.__name__: module for module in modules_of_sentence_transformers()}
    assert {"Pooling", "Dense", "SpladePooling", "MultiVectorMask"} <= found.keys()
    assert found.keys() - MODULE_CONFIGS.keys() - {*REFUSED_MODULES} == {"Transformer", "MLMTransformer"}
    for name, table in MODULE_CONFIGS.items():
        module = found[name]
        stored = {*module.config_keys, *module.config_key_renames, *module.config_key_renames.values()}
        # Weights are arguments of Dense, and in no file.
        arguments = parameters(module.__init__) - {"self", "init_weight", "init_bias", "kwargs", "args"}
        assert stored | arguments <= table.keys(), name


def test_keys_of_the_transformer_module() -> None:
    stored = {*Transformer.config_keys} | parameters(Transformer.__init__) | OLDER["sentence_bert_config.json"]
    # The decorator hides the signature; these are the former names of arguments.
    assert stored - {"self", "args", "kwargs", "model_name_or_path"} <= SENTENCE_BERT_CONFIG.keys()
    assert keys_in(import_module(Transformer.__module__), "text_overrides") <= PROCESSING_KWARGS.keys()
    called = parameters(tokenization_utils_base.PreTrainedTokenizerBase.__call__)
    assert called - {"self", "kwargs", "text", "text_pair", "text_target", "text_pair_target"} <= {
        *PROCESSING_KWARGS,
        "tokenizer_kwargs",
    }


@pytest.mark.parametrize("family", sorted(CONFIG_OF_MODEL_TYPE))
def test_keys_of_an_architecture(family: str) -> None:
    table = {**CONFIG, **CONFIG_OF_MODEL_TYPE[family]}
    assert OLDER["config.json"] <= table.keys()
    if family != "new":  # no class of transformers
        own = getattr(transformers, MODEL_CASES[family][0] + "Config")()
        assert own.to_dict().keys() | parameters(type(own).__init__) - {"self"} <= table.keys()


def test_keys_of_tokenizers() -> None:
    read = {*OLDER["tokenizer_config.json"], *tokenization_utils_base.PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES}
    for module in (tokenization_utils_base, tokenization_utils_tokenizers, tokenization_auto):
        read |= keys_in(module, "kwargs", "init_kwargs", "tokenizer_config", "local_kwargs")
    for name in ("Bert", "DistilBert", "MPNet", "Roberta", "XLMRoberta", "Camembert", "Albert"):
        read |= parameters(getattr(transformers, f"{name}Tokenizer").__init__)
    assert read - ARGUMENTS <= TOKENIZER_CONFIG.keys()
    stored = json.loads(tokenizers.Tokenizer(tokenizers.models.WordLevel({}, unk_token="")).to_str())
    assert stored.keys() == TOKENIZER.keys()


def test_unknown_and_refused_keys() -> None:
    path, table = Path("a.json"), {"old": refused("another order", False)}
    assert check_keys(path, {"old": False}, table) == ()
    (notice,) = check_keys(path, {"new": 1, "newer": 2}, table)
    assert "new, newer" in notice
    for value in (True, 0, None):
        with pytest.raises(UnsupportedModel, match=rf"^a\.json: old {value} .*another order.*supported: False$"):
            check_keys(path, {"old": value}, table)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "modules.json",
        "1_Pooling/config.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
    ],
)
def test_an_unknown_key_of_each_file_is_a_notice(build_bert: BuildBert, name: str) -> None:
    folder = build_bert()
    path = folder / name
    if not path.exists():
        path.write_text("{}")
    if name == "modules.json":
        listed = json.loads(path.read_text())
        path.write_text(json.dumps([{**listed[0], "no_such_key": 1}, *listed[1:]]))
    else:
        edit_json(path, no_such_key=1)
    (notice,) = engine.load_model(str(folder)).notices
    assert notice.startswith(str(path))
    assert "no_such_key" in notice


def test_the_page_is_made_from_the_code() -> None:
    assert PAGE.read_text() == replaced(), "run scripts/document"
