"""The rival without padding computes what transformers computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

from benchmarks.rivals.packed_torch import Packed, PackedDecoder, PackedRotary
from embert.engine import pack

LENGTHS = [1, 7, 40, 3]
SHAPE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2, "head_dim": 16}
GEMMA = {**GROUPED, "sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20}
CASES: dict[str, tuple[type[Packed], str, str, dict[str, Any]]] = {
    "modernbert": (PackedRotary, "ModernBert", "mean", {**SHAPE, "local_attention": 8, "pad_token_id": 0}),
    "qwen3": (PackedDecoder, "Qwen3", "last-token", GROUPED),
    "qwen3, windows": (
        PackedDecoder,
        "Qwen3",
        "last-token",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "gemma3": (PackedDecoder, "Gemma3Text", "mean", {**GEMMA, "use_bidirectional_attention": True}),
    "gemma3, causal": (PackedDecoder, "Gemma3Text", "last-token", GEMMA),
    "embedding_gemma2": (
        PackedDecoder,
        "EmbeddingGemma2Text",
        "mean",
        {
            **GROUPED,
            "sliding_window": 6,
            "sliding_window_pattern": 2,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 24,
            "embedding_dim": 40,
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_vectors_are_those_of_transformers(case: str) -> None:
    rival, name, pooling, fields = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**fields)
    model = getattr(transformers, f"{name}Model")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    random = np.random.default_rng(0)
    sequences = [random.integers(3, 200, length).astype(np.int32) for length in LENGTHS]
    with torch.inference_mode():
        vectors = rival(model, pooling).vectors(pack(sequences))
        for ids, vector in zip(sequences, vectors, strict=True):
            states = model(torch.tensor(ids[None].astype(np.int64))).last_hidden_state[0]
            expected = states[-1] if pooling == "last-token" else states.mean(0)
            np.testing.assert_allclose(vector, torch.nn.functional.normalize(expected, dim=0), atol=1e-5)
