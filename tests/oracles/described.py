"""Small models with what newer encoders have, by description: for encoders that need no model_type's config."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from embert import engine
from embert.engine.model import Model
from embert.engine.models.encoder_config import Attention, Convolution, Experts, Rotary, tensor_shapes
from embert.engine.models.tensor_names import TOKEN_TYPE_EMBEDDINGS, TensorNames, WeightMapping
from tests.oracles.model_cases import build, byte_level

HIDDEN, HEADS, LAYERS, INNER = 64, 2, 3, 96
ROTARY = Rotary(10000.0, HIDDEN // HEADS)
GLOBAL, LOCAL = Attention(Rotary(160000.0, HIDDEN // HEADS)), Attention(ROTARY, 8)
NO_TABLE: dict[str, Any] = {"position_table": False, "first_position": 0}
CAUSAL = {
    **NO_TABLE, "gated": True, "pre_norm": True, "rms_norm": True, "embedding_norm": False, "activation": "silu",
    "causal": True, "layer_norm_eps": 1e-6,
}  # fmt: skip
WIDE_HEADS = Attention(Rotary(1e6, 48))
# A kind of model → how its architecture differs from BERT's.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "ModernBERT's": {
        **NO_TABLE, "attention": (GLOBAL, LOCAL, LOCAL), "gated": True, "pre_norm": True, "first_norm": False,
    },
    "pre-norm throughout": {**NO_TABLE, "attention": (LOCAL, GLOBAL, LOCAL), "pre_norm": True},
    "Nomic's": {**NO_TABLE, "attention": (Attention(ROTARY),) * LAYERS, "gated": True, "activation": "silu"},
    # Each row passes both, so that no rounding decides it.
    "Nomic's with experts": {**NO_TABLE, "attention": (Attention(ROTARY),) * LAYERS, "experts": Experts(2, 2, (0, 2))},
    "half turned": {**NO_TABLE, "attention": (Attention(Rotary(1000.0, 24)),) * LAYERS, "activation": "gelu_tanh"},
    "JinaBERT's": {**NO_TABLE, "alibi": True, "gated": True},
    "ELECTRA's": {"embedding_size": 32},
    "rubert-tiny2's": {"hidden_size": 104, "heads": 4},  # heads of 26 columns
    "ALBERT's": {"embedding_size": 32, "shared_layers": (0,) * LAYERS, "activation": "gelu_tanh"},
    "Qwen3's": {
        **CAUSAL, "heads": 4, "key_value_heads": 2, "head_columns": 48, "qk_norm": True,
        "attention": (WIDE_HEADS, WIDE_HEADS, dataclasses.replace(WIDE_HEADS, window=8)),
    },
    "LLaMA's": {**CAUSAL, "heads": 4, "key_value_heads": 1, "attention": (Attention(Rotary(1e4, 16)),) * LAYERS},
    "LFM2's": {
        **CAUSAL, "heads": 4, "key_value_heads": 2, "qk_norm": True,
        "attention": (Attention(Rotary(1e6, 16)), Attention(convolution=Convolution(4)),
                      Attention(convolution=Convolution(3, 1))),
    },
    "in both directions": {**CAUSAL, "causal": False, "key_value_heads": 1, "attention": (GLOBAL,) * LAYERS},
    "Gemma's": {
        **CAUSAL, "causal": False, "heads": 3, "key_value_heads": 1, "head_columns": 64, "qk_norm": True,
        "attention": (Attention(Rotary(1e4, 64), 8), Attention(Rotary(1e4, 64), 8), Attention(Rotary(1e6, 64))),
        "sublayer_norms": True, "norm_offset": 1.0, "embedding_scale": 8.0, "attention_scale": 0.1,
        "activation": "gelu_tanh",
    },
    "EmbeddingGemma 2's": {
        **CAUSAL, "causal": False, "heads": 4, "key_value_heads": 2, "head_columns": 48, "qk_norm": True,
        "attention": (
            dataclasses.replace(WIDE_HEADS, window=8),
            Attention(Rotary(1e6, 96), head_columns=96, key_value_heads=1), WIDE_HEADS,
        ),
        "sublayer_norms": True, "value_norm": True, "layer_inputs": 40, "embedding_scale": 8.0, "attention_scale": 0.1,
        "activation": "gelu_tanh",
    },
}  # fmt: skip


def described(
    folder: Path, kind: str, *, stored: torch.dtype = torch.float32, pooling: str = "mean", **more: Any
) -> Model:
    """A model of that kind in a folder, with random weights, gammas and biases. `more`: of the architecture."""
    build(folder, "bert")
    byte_level(300).save(str(folder / "tokenizer.json"))
    model = engine.load_model(str(folder), pooling=pooling)
    sizes = {"hidden_size": HIDDEN, "heads": HEADS, "layers": LAYERS, "intermediate_size": INNER}
    config = dataclasses.replace(
        model.config, tensors=TensorNames((WeightMapping(),)), **{**sizes, **ARCHITECTURES[kind], **more}
    )
    random = np.random.default_rng(5)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = random.standard_normal(shape) * (0.2 if len(shape) == 1 else 0.1)
        if name.endswith(("Norm.weight", "_norm.weight")):
            values += 1 - config.norm_offset
        elif name == TOKEN_TYPE_EMBEDDINGS and not config.embedding_norm:
            values[:] = 0  # no decoder has token types
        elif name.startswith("embeddings."):
            values *= 5
        tensors[name] = torch.from_numpy(values).to(stored)
    save_file(tensors, folder / "model.safetensors")
    return dataclasses.replace(model, config=config)
