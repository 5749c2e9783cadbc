"""The tables of keys compared with the installed libraries: each key that these read has a row, and readers use it."""

from __future__ import annotations

import inspect
import json
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from transformers import tokenization_utils_base

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
)
from tests.engine.conftest import BuildBert
from tests.oracles.model_cases import MODEL_CASES, hugging_face
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
}  # fmt: skip


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def modules_of_sentence_transformers() -> Iterator[type[Any]]:
    import sentence_transformers
    from sentence_transformers.base.modules import Module

    for info in pkgutil.walk_packages(sentence_transformers.__path__, "sentence_transformers."):
        if ".modules" in info.name and ".tokenizer" not in info.name:
            for found in vars(import_module(info.name)).values():
                if inspect.isclass(found) and issubclass(found, Module) and not inspect.isabstract(found):
                    yield found


def test_every_module_of_sentence_transformers_is_known() -> None:
    found = {module.__name__: module for module in modules_of_sentence_transformers()}
    assert {"Pooling", "Dense", "SpladePooling", "MultiVectorMask"} <= found.keys()
    assert found.keys() - MODULE_CONFIGS.keys() - {*REFUSED_MODULES} == {
        "Transformer", "MLMTransformer", "StaticEmbedding",  # the last has no config.json
    }  # fmt: skip
    for name, table in MODULE_CONFIGS.items():
        module = found[name]
        stored = {*module.config_keys, *module.config_key_renames, *module.config_key_renames.values()}
        # Weights are arguments of Dense, and in no file.
        arguments = parameters(module.__init__) - {"self", "init_weight", "init_bias", "kwargs", "args"}
        assert stored | arguments <= table.keys(), name


def test_keys_of_the_transformer_module() -> None:
    from sentence_transformers.base.modules import Transformer

    stored = {*Transformer.config_keys} | parameters(Transformer.__init__) | OLDER["sentence_bert_config.json"]
    # The decorator hides the signature; these are the former names of arguments.
    assert stored - {"self", "args", "kwargs", "model_name_or_path"} <= SENTENCE_BERT_CONFIG.keys()
    called = parameters(tokenization_utils_base.PreTrainedTokenizerBase.__call__)
    assert called - {"self", "kwargs", "text", "text_pair", "text_target", "text_pair_target"} <= {
        *PROCESSING_KWARGS,
        "tokenizer_kwargs",
    }


@pytest.mark.parametrize("model_type", sorted(CONFIG_OF_MODEL_TYPE))
def test_keys_of_an_architecture(model_type: str) -> None:
    table = {**CONFIG, **CONFIG_OF_MODEL_TYPE[model_type]}
    assert OLDER["config.json"] <= table.keys()
    if model_type != "new":  # no class of transformers
        own = hugging_face((MODEL_CASES[model_type][0] if model_type in MODEL_CASES else "Mistral3") + "Config")()
        assert own.to_dict().keys() | parameters(type(own).__init__) - {"self"} <= table.keys()


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
        "config.json", "modules.json", "1_Pooling/config.json", "sentence_bert_config.json",
        "config_sentence_transformers.json",
    ],
)  # fmt: skip
def test_unknown_key_of_each_file_is_a_notice(build_bert: BuildBert, name: str) -> None:
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
