"""Odd heads, modules and weights: embert's vectors are sentence-transformers', or the file is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine.checkpoints import SHAPE, WORDS, check, write

HIDDEN = 32
ACTIVATION = "torch.nn.modules.activation."

# A module → its class in version 6.
NEW = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "LayerNorm": "sentence_transformers.sentence_transformer.modules.layer_norm.LayerNorm",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
    "Dropout": "sentence_transformers.sentence_transformer.modules.dropout.Dropout",
}

Weights = dict[str, torch.Tensor]


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def modules(
    folder: Path, *kinds: str, pooling: Any = "mean", version: int = 5, dtype: torch.dtype = torch.float32, **dense: Any
) -> Path:
    """Write modules after pooling, each with the columns that are left; `dense` are fields of Dense modules."""
    pooled = pooling if isinstance(pooling, dict) else {"pooling_mode": pooling, "embedding_dimension": HIDDEN}
    modes = pooled.get("pooling_mode", "mean")
    columns = HIDDEN * (len(modes) if isinstance(modes, list) else max(1, sum(v is True for v in pooled.values())))
    files: dict[str, Any] = {"1_Pooling/config.json": pooled}
    weights: dict[str, Weights] = {}
    listed = [("Transformer", ""), ("Pooling", "1_Pooling")]
    listed += [(kind, f"{i}_{kind}") for i, kind in enumerate(kinds, start=2)]
    for kind, path in listed[2:]:
        if kind == "Dense":
            fields = {"in_features": columns, "out_features": 12, "bias": True, **dense}
            weights[path] = {"linear.weight": draw(12, columns), "linear.bias": draw(12)}
            if not fields["bias"]:
                del weights[path]["linear.bias"]
            if fields.get("use_residual") and columns != 12:
                weights[path]["residual.weight"] = draw(12, columns)
            files[f"{path}/config.json"], columns = fields, 12
        elif kind == "LayerNorm":
            weights[path] = {"norm.weight": draw(columns), "norm.bias": draw(columns)}
            files[f"{path}/config.json"] = {"dimension": columns}
        elif kind == "Dropout":
            files[f"{path}/config.json"] = {"dropout": 0.3}
    files["modules.json"] = [
        {
            "name": str(i),
            "idx": i,
            "path": path,
            "type": NEW[kind] if version == 6 else f"sentence_transformers.models.{kind}",
        }
        for i, (kind, path) in enumerate(listed)
    ]
    write(folder, files=files)
    for path, tensors in weights.items():
        save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, folder / path / "model.safetensors")
    return folder


def headed(folder: Path, name: str, *, pooling: str | None = "cls") -> Path:
    """The weights of a class with a head, of the same shape."""
    write(folder, files={"1_Pooling/config.json": {"pooling_mode": pooling, "embedding_dimension": HIDDEN}})
    torch.manual_seed(1)
    shape: dict[str, Any] = {**SHAPE, "vocab_size": len(WORDS), "initializer_range": 0.3}
    config = transformers.BertConfig(**shape)
    model: Any = getattr(transformers, name)(config)
    model.save_pretrained(folder)
    if pooling is None:
        (folder / "modules.json").unlink()
    return folder


def listed(folder: Path, modules: list[dict[str, str]]) -> Path:
    """A model whose modules.json lists these."""
    return write(folder, files={"modules.json": modules})


def changed(folder: Path, change: Callable[[Weights], Weights]) -> Path:
    """The same checkpoint with other tensors."""
    write(folder)
    path = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}, path, {"format": "pt"})
    return folder


FLAGS = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": False}
AGREE: dict[str, Callable[[Path], Path]] = {
    "a token classifier with cls pooling": lambda to: headed(to, "BertForTokenClassification"),
    "a pre-training model without modules": lambda to: headed(to, "BertForPreTraining", pooling=None),
    "a question answerer with weightedmean": lambda to: headed(to, "BertForQuestionAnswering", pooling="weightedmean"),
    "a sequence classifier with a Pooling module": lambda to: headed(to, "BertForSequenceClassification"),
    "tensors of another model beside the encoder's": lambda to: changed(
        to, lambda weights: weights | {"vision_model.patch.weight": draw(3, 3), "logit_scale": torch.ones(())}
    ),
    "the names of TensorFlow under a prefix, with buffers": lambda to: changed(
        to,
        lambda weights: (
            {
                "bert."
                + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): w
                for name, w in weights.items()
            }
            | {"bert.embeddings.position_ids": torch.arange(66)[None]}
        ),
    ),
    "three flags of version 1, and a width that is not there": lambda to: modules(
        to,
        pooling={
            **FLAGS,
            "pooling_mode_weightedmean_tokens": True,
            "pooling_mode_cls_token": True,
            "pooling_mode_lasttoken": True,
            "word_embedding_dimension": 7,
        },
    ),
    "a mode and flags that contradict it": lambda to: modules(
        to, pooling={**FLAGS, "pooling_mode": "max", "pooling_mode_cls_token": True}
    ),
    "all six modes, from the last to the first": lambda to: modules(
        to, "LayerNorm", pooling=["lasttoken", "weightedmean", "mean_sqrt_len_tokens", "mean", "max", "cls"]
    ),
    "a Dense module that names no activation: Tanh": lambda to: modules(to, "Dense", "Normalize"),
    "a Dropout as activation, no bias": lambda to: modules(
        to, "Dense", activation_function="torch.nn.modules.dropout.Dropout", bias=False
    ),
    "Softplus after two Normalize": lambda to: modules(
        to, "Normalize", "Dropout", "Normalize", "Dense", activation_function=ACTIVATION + "Softplus"
    ),
    "a residual by a matrix, then LayerNorm, files of version 6": lambda to: modules(
        to, "Dense", "LayerNorm", version=6, activation_function=ACTIVATION + "LeakyReLU", use_residual=True
    ),
    "modules in bfloat16": lambda to: modules(
        to, "LayerNorm", "Dense", dtype=torch.bfloat16, activation_function=ACTIVATION + "SiLU"
    ),
    "modules in float16 with a key of PyLate": lambda to: modules(
        to, "Dense", "Normalize", "LayerNorm", dtype=torch.float16, activation_function="torch.nn.ELU", new_key=1
    ),
}
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "an activation with weights": (
        lambda to: modules(to, "Dense", activation_function=ACTIVATION + "PReLU"), "activation_function"
    ),
    "an activation of somebody's own code": (
        lambda to: modules(to, "Dense", activation_function="my.module.Swish"), "activation_function"
    ),
    "an activation that halves the columns": (
        lambda to: modules(to, "Dense", activation_function=ACTIVATION + "GLU"), "activation_function"
    ),
    "a Dense module beside the vector": (
        lambda to: modules(to, "Dense", module_output_name="other"), "module_output_name"
    ),
    "a pooling that is none": (lambda to: modules(to, pooling=["mean", "sum"]), "pooling_mode mean + sum"),
    "code of somebody's own under the name of jina's": (
        lambda to: listed(to, [{"path": "", "type": "custom_st.Transformer"}]), "module custom_st.Transformer first"
    ),
    "no modules": (lambda to: listed(to, []), "modules.json must list objects"),
    "a layer's tensor that no config names": (
        lambda to: changed(to, lambda w: w | {"encoder.layer.0.attention.self.scale": torch.ones(1)}),
        "encoder.layer.0.attention.self.scale",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", AGREE)
def test_vectors_of_sentence_transformers(tmp_path: Path, case: str) -> None:
    check(AGREE[case](tmp_path / "a"))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_by_name(tmp_path: Path, case: str) -> None:
    make, message = REFUSED[case]
    check(make(tmp_path / "a"), refusal=message)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's own
@pytest.mark.parametrize("alone", [False, True])
def test_an_adapter_that_sentence_transformers_loads(tmp_path: Path, alone: bool) -> None:
    peft = pytest.importorskip("peft", reason="sentence-transformers loads adapters with peft, which is not installed")
    base, folder = write(tmp_path / "base"), write(tmp_path / "a")
    model: Any = transformers.AutoModel.from_pretrained(base)
    about = {"target_modules": ["query", "dense", "word_embeddings"], "bias": "all", "modules_to_save": ["LayerNorm"]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, alpha_pattern={"dense": 2}, **about))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn_like(parameter) * 0.2 + 0.3
    adapted.save_pretrained(folder)
    fields = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**fields, "base_model_name_or_path": str(base)}))
    if alone:
        (folder / "config.json").unlink()
        (folder / "model.safetensors").unlink()
    check(folder)
