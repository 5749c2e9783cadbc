"""LoRA adapters as PEFT writes them, made by hand: merged into the base's weights, or refused by the key's name."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine.encoders.cuda.encoder import CudaEncoder
from embert.engine.errors import BrokenModel, ModelError, UnsupportedModel
from embert.engine.files.json_files import Verdict
from embert.engine.files.key_tables import ADAPTER_CONFIG
from embert.engine.lora import read_lora
from embert.engine.tasks import Task
from tests.engine.conftest import BuildBert, HuggingFace, Install, random_sequences, small_tokenizer, unit
from tests.engine.heads.test_sparse import dense, sparse
from tests.oracles.model_cases import build
from tests.server.models import edit_json

HIDDEN, INNER, VOCABULARY = 64, 96, 64
QUERY, VALUE = (f"encoder.layer.{layer}.attention.self.{name}" for layer, name in ((0, "query"), (1, "value")))
DENSE, WORDS = "encoder.layer.1.intermediate.dense", "embeddings.word_embeddings"
ABOUT = {
    "peft_type": "LORA", "task_type": "FEATURE_EXTRACTION", "base_model_name_or_path": "org/base", "r": 4,
    "lora_alpha": 12, "target_modules": ["query", "value"], "bias": "none",
}  # fmt: skip

Tensors = dict[str, torch.Tensor]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * 0.3


def add(tensors: Tensors, weights: Tensors, module: str, rank: int, scale: float, *, prefix: str = "") -> None:
    """An adapter of a module, which is added to its weight, as PEFT's documents define it."""
    weight, named = weights[f"{module}.weight"], f"base_model.model.{prefix}{module}"
    if module == WORDS:
        a, b = draw(rank, len(weight)), draw(weight.shape[1], rank)
        tensors |= {f"{named}.lora_embedding_A": a, f"{named}.lora_embedding_B": b}
        weights[f"{module}.weight"] = weight.float() + scale * (b @ a).T
    else:
        a, b = draw(rank, weight.shape[1]), draw(len(weight), rank)
        tensors |= {f"{named}.lora_A.weight": a, f"{named}.lora_B.weight": b}
        weights[f"{module}.weight"] = weight.float() + scale * b @ a


def write(folder: Path, tensors: Tensors, **fields: Any) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({**ABOUT, **fields}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")


def equals_merged(folder: Path, weights: Tensors, tmp_path: Path) -> None:
    """The vectors of the folder with the adapter are HuggingFace's of the base with these weights."""
    merged = tmp_path / "merged"
    merged.mkdir()
    shutil.copy(folder / "config.json", merged)
    save_file({name: tensor.float().contiguous() for name, tensor in weights.items()}, merged / "model.safetensors")
    sequences = random_sequences([3, 17, 40], VOCABULARY)
    oracle = HuggingFace(merged)
    encoder = engine.load_encoder(engine.load_model(str(folder)), device="cpu")
    found = encoder.encode(dataclasses.replace(engine.pack(sequences), normalize=np.zeros(3, np.bool_)))
    wanted = np.stack([oracle.pooled(ids, "mean") for ids in sequences])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    (folder / "adapter_config.json").unlink()
    base = engine.load_encoder(engine.load_model(str(folder)), device="cpu").encode(engine.pack(sequences))
    assert not np.allclose(base, unit(wanted), atol=1e-2)


@pytest.mark.parametrize(
    ("fields", "adapted"),
    [
        ({}, {QUERY: (4, 3), VALUE: (4, 3)}),
        ({"use_rslora": True}, {QUERY: (4, 12 / math.sqrt(4))}),
        (
            {"rank_pattern": {"layer.0.attention.self.query": 8}, "alpha_pattern": {"value": 5}},
            {QUERY: (8, 12 / 8), VALUE: (4, 5 / 4)},
        ),
        ({"target_modules": ["query", "word_embeddings"]}, {QUERY: (4, 3), WORDS: (4, 3)}),
        ({"target_modules": r".*\.(value|dense)"}, {VALUE: (4, 3), DENSE: (4, 3)}),
        ({"target_modules": "all-linear", "exclude_modules": ["key"]}, {QUERY: (4, 3), DENSE: (4, 3)}),
        ({"target_modules": ["query", "value"], "layers_to_transform": [1]}, {VALUE: (4, 3)}),
        ({"layers_to_transform": 0, "layers_pattern": "layer", "fan_in_fan_out": True}, {QUERY: (4, 3)}),
        ({"init_lora_weights": "gaussian", "lora_dropout": 0.1, "peft_version": "0.21.2"}, {QUERY: (4, 3)}),
    ],
    ids=str,
)
def test_sum_of_base_and_adapter(
    build_bert: BuildBert, tmp_path: Path, fields: dict[str, Any], adapted: dict[str, tuple[int, float]]
) -> None:
    folder, tensors = build_bert(), dict[str, torch.Tensor]()
    weights = load_file(folder / "model.safetensors")
    for module, (rank, scale) in adapted.items():
        add(tensors, weights, module, rank, scale)
    write(folder, tensors, **fields)
    equals_merged(folder, weights, tmp_path)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_what_an_adapter_stores_whole(build_bert: BuildBert, tmp_path: Path, stored: torch.dtype) -> None:
    """Biases, modules to save, and a bias of B; a base in bfloat16."""
    folder, tensors = build_bert(dtype=stored), dict[str, torch.Tensor]()
    weights = load_file(folder / "model.safetensors")
    add(tensors, weights, QUERY, 4, 3.0)
    prefix, norm = "base_model.model.", "encoder.layer.1.output.LayerNorm"
    whole = {f"{norm}.weight": 1 + draw(HIDDEN), f"{norm}.bias": draw(HIDDEN), f"{DENSE}.bias": draw(INNER)}
    weights |= whole
    tensors |= {prefix + name: tensor for name, tensor in whole.items()}
    # With both kinds PEFT stores the same bias again, and the base's.
    tensors[f"{prefix}{norm}.modules_to_save.bias"] = whole[f"{norm}.bias"].clone()
    tensors[f"{prefix}{norm}.original_module.bias"] = draw(HIDDEN)
    weights[f"{QUERY}.bias"] = draw(HIDDEN)
    tensors[f"{prefix}{QUERY}.base_layer.bias"] = weights[f"{QUERY}.bias"]
    tensors[f"{prefix}{VALUE}.lora_B.bias"] = draw(HIDDEN)
    weights[f"{VALUE}.bias"] = weights[f"{VALUE}.bias"].float() + 3 * tensors[f"{prefix}{VALUE}.lora_B.bias"]
    add(tensors, weights, VALUE, 4, 3.0)
    write(folder, tensors, bias="all", modules_to_save=["LayerNorm"], lora_bias=True)
    equals_merged(folder, weights, tmp_path)


def test_adapter_of_a_classifier(tmp_path: Path) -> None:
    """Modules have the prefix of a model with a head, and the head itself is stored whole."""
    build(tmp_path, "bert", head="ForSequenceClassification", modules=False, num_labels=3)
    small_tokenizer(VOCABULARY).save(str(tmp_path / "tokenizer.json"))
    base: Any = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    weights, tensors = load_file(tmp_path / "model.safetensors"), dict[str, torch.Tensor]()
    for module in (f"bert.{QUERY}", "bert.pooler.dense"):
        add(tensors, weights, module, 4, 3.0)
    weights["classifier.weight"] = tensors["base_model.model.classifier.weight"] = draw(3, HIDDEN)
    write(tmp_path, tensors, task_type="SEQ_CLS", target_modules=["query", "dense"], modules_to_save=["classifier"])
    base.load_state_dict(weights)
    sequences = random_sequences([3, 17], VOCABULARY)
    encoder = engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu")
    found = encoder.encode(engine.pack(sequences), Task.CLASSIFY)
    with torch.inference_mode():
        wanted = [base(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy() for ids in sequences]
    np.testing.assert_allclose(found, np.stack(wanted), rtol=1e-4, atol=1e-4)


def test_tied_decoder_is_the_bases_word_table(tmp_path: Path, install: Install) -> None:
    build(tmp_path, "bert", head="ForMaskedLM", modules=False)
    small_tokenizer(VOCABULARY).save(str(tmp_path / "tokenizer.json"))
    base: Any = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    weights, tensors = load_file(tmp_path / "model.safetensors"), dict[str, torch.Tensor]()
    bare = {name.removeprefix("bert."): tensor for name, tensor in weights.items()}
    add(tensors, bare, WORDS, 4, 3.0, prefix="bert.")
    write(tmp_path, tensors, target_modules=["word_embeddings"])
    base.cls.predictions.decoder.weight = torch.nn.Parameter(weights[f"bert.{WORDS}.weight"].clone())
    base.bert.embeddings.word_embeddings.weight = torch.nn.Parameter(bare[f"{WORDS}.weight"])
    (ids,) = random_sequences([17], VOCABULARY)
    with torch.inference_mode():
        logits = base(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        wanted = torch.log1p(torch.relu(logits)).max(0).values.numpy()
    model = engine.load_model(str(tmp_path), pooling="splade")
    install(model)
    for encoder in (engine.load_encoder(model, device="cpu"), CudaEncoder(model, dtype="float32")):
        np.testing.assert_allclose(dense(sparse(encoder, [ids]), 0, VOCABULARY), wanted, rtol=1e-4, atol=1e-4)


def test_adapter_without_its_base(build_bert: BuildBert, tmp_path: Path) -> None:
    base, folder, tensors = build_bert(), tmp_path / "adapter", dict[str, torch.Tensor]()
    weights = load_file(base / "model.safetensors")
    add(tensors, weights, QUERY, 4, 3.0)
    folder.mkdir()
    write(folder, tensors, base_model_name_or_path=str(base))
    with pytest.raises(BrokenModel, match=r"adapter and no tokenizer\.json; copy the tokenizer's files from .*model$"):
        engine.load_model(str(folder))
    for name in ("tokenizer.json", "modules.json", "1_Pooling"):
        shutil.move(base / name, folder / name)
    model = engine.load_model(str(folder))
    assert (model.weights_folder, model.transformer_folder) == (base, folder)
    found = engine.Engine.load(model, device="cpu").embed(["a cat"], normalize=False)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(base / name, folder)
    np.testing.assert_array_equal(
        engine.Engine.load(str(folder), device="cpu").embed(["a cat"], normalize=False), found
    )
    (folder / "config.json").unlink()
    for path, message in (
        (None, "base_model_name_or_path of adapter_config.json does not name that; merge them once with: pip install"),
        (str(tmp_path / "none"), "adapter without its base model .*none, which cannot be loaded .*; merge them once"),
        (str(folder / "1_Pooling"), "adapter without its base model .*Pooling.*; merge them once|no model_type"),
    ):
        edit_json(folder / "adapter_config.json", base_model_name_or_path=path)
        with pytest.raises(ModelError, match=message):
            engine.load_model(str(folder))


WRONG: Sequence[tuple[dict[str, Any], str]] = [
    ({"r": 0}, "r must be a positive int, found 0"),
    ({"lora_alpha": "8"}, "lora_alpha must be a positive number, found '8'"),
    ({"rank_pattern": {"query": 1.5}}, r"rank_pattern\.query must be a positive int, found 1\.5"),
    ({"alpha_pattern": [3]}, r"alpha_pattern must be an object, found \[3\]"),
    ({"target_modules": 3}, "target_modules must be a text or a list of texts, found 3"),
    ({"target_modules": "("}, r"'\(' is not a regular expression"),
    ({"layers_to_transform": ["1"]}, r"layers_to_transform must be a list of ints, found \['1'\]"),
    ({"r": 5}, r"lora_B\.weight has shape \[64, 4\], the base model and the rank imply \[64, 5\]"),
    ({"target_modules": ["value"]}, r"lora_A\.weight, and .*adapter_config\.json adapts no encoder\.layer\.0"),
    ({"exclude_modules": "encoder.*query"}, r"adapts no encoder\.layer\.0\.attention\.self\.query"),
    ({"layers_to_transform": [1]}, r"adapts no encoder\.layer\.0\.attention\.self\.query"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=str)
def test_values_that_contradict_the_file(build_bert: BuildBert, fields: dict[str, Any], message: str) -> None:
    folder, tensors = build_bert(), dict[str, torch.Tensor]()
    add(tensors, load_file(folder / "model.safetensors"), QUERY, 4, 3.0)
    write(folder, tensors, **fields)
    with pytest.raises(BrokenModel, match=message):
        engine.load_encoder(engine.load_model(str(folder)), device="cpu")


@pytest.mark.parametrize("name", [name for name, key in ADAPTER_CONFIG.items() if key.verdict is Verdict.REFUSED])
def test_keys_that_are_refused(build_bert: BuildBert, name: str) -> None:
    folder = build_bert()
    for value in ADAPTER_CONFIG[name].accepted:
        write(folder, {"x": draw(1)}, **{name: value})
        assert read_lora(folder) is not None
    for value in ("pissa", {"a": 1}, 3):
        write(folder, {"x": draw(1)}, **{name: value})
        with pytest.raises(UnsupportedModel, match=rf"adapter_config\.json: {name} .* is not supported"):
            engine.load_model(str(folder))


def test_files_that_cannot_be_read(build_bert: BuildBert) -> None:
    folder = build_bert()
    write(folder, {"base_model.model.encoder.layer.7.output.dense.lora_A.weight": draw(4, 4)}, target_modules=["dense"])
    with pytest.raises(BrokenModel, match=r"layer\.7\.output\.dense\.lora_A\.weight, which belongs to no weight"):
        engine.load_encoder(engine.load_model(str(folder)), device="cpu")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UnsupportedModel, match=r"only pickled weights \(adapter_model\.bin\)"):
        engine.load_model(str(folder))
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(BrokenModel, match=r"has adapter_config\.json and no adapter_model\.safetensors"):
        engine.load_model(str(folder))
    edit_json(folder / "adapter_config.json", new_key=1, peft_type=None)
    with pytest.raises(UnsupportedModel, match=r"peft_type None is not supported"):
        engine.load_model(str(folder))
