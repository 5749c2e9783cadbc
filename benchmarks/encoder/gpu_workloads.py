"""Models and batches of the GPU benchmarks: weights of known shapes, random ids of known lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from benchmarks.lib import random_model
from embert.engine.batch import PackedBatch

SHAPES: dict[str, dict[str, Any]] = {
    "base": {},
    "narrow": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}
THROUGHPUT = ["query", "passage", "uniform512", "128x128", "32x512"]
LATENCY = ["1x16", "1x32", "1x64", "1x128", "1x256", "1x512", "8x32", "32x32"]


def lengths_of(workload: str) -> npt.NDArray[np.int64]:
    """Return the lengths of a workload's texts in tokens, int64 [B]; the same in every run."""
    random = np.random.default_rng(0)
    if workload == "query":
        return random.integers(8, 25, 512)
    if workload == "passage":
        return np.clip(random.lognormal(np.log(92), 0.5, 256), 16, 256).astype(np.int64)
    if workload == "uniform512":
        return random.integers(1, 513, 64)
    count, length = workload.split("x")
    return np.full(int(count), int(length))


def random_batch(lengths: npt.NDArray[np.int64]) -> PackedBatch:
    """Return random ids of these lengths."""
    ids = np.random.default_rng(1).integers(1000, 30000, int(lengths.sum())).astype(np.int32)
    return PackedBatch(ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def model_folder(name: str, scratch: Path) -> Path:
    """Return the folder of name=FOLDER, or write random weights: "base" in FP32, "base/float16" in FP16.

    Names are of SHAPES, "mpnet", or of random_model.SHAPES.
    """
    if "=" in name:
        return Path(name.partition("=")[2])
    (scratch / "tokenizer.json").write_text("{}")  # a model folder must have one; nothing here reads it
    torch.manual_seed(0)
    shape, _, stored = name.partition("/")
    model: Any
    if shape in random_model.SHAPES:
        model = random_model.of_shape(shape)
    elif shape == "mpnet":
        config = transformers.MPNetConfig(vocab_size=30527, max_position_embeddings=514)
        model = transformers.MPNetModel(config, add_pooling_layer=False)
    else:
        model = transformers.BertModel(transformers.BertConfig(**SHAPES[shape]), add_pooling_layer=False)
    model.to(getattr(torch, stored or "float32")).save_pretrained(scratch)
    return scratch
