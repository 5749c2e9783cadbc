"""GTE: both spellings of config.json and of tensor names, and the fixed NTK of the older code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine.models import read_config
from embert.engine.models.encoder_config import Attention, Ntk, Rotary
from tests.engine.conftest import Ids, random_sequences, small_tokenizer
from tests.engine.test_model_types import READS, has_the_same_outputs
from tests.oracles.exact import Doubles, hidden_states, near
from tests.oracles.model_cases import build

LENGTHS = [1, 2, 17, 33, 64, 65, 128, 5]
# As gte-large-en-v1.5's, smaller.
CONFIG: dict[str, Any] = {
    "model_type": "new", "architectures": ["NewModel"], "attention_probs_dropout_prob": 0.0, "classifier_dropout": None,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 64, "intermediate_size": 96,
    "layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm", "logn_attention_clip1": False,
    "logn_attention_scale": False, "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 2,
    "pack_qkv": True, "pad_token_id": 0, "position_embedding_type": "rope",
    "rope_scaling": {"factor": 2.0, "type": "ntk"}, "rope_theta": 160000, "type_vocab_size": 1, "unpad_inputs": False,
    "use_memory_efficient_attention": False, "vocab_size": 64,
}  # fmt: skip


def written(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps({**CONFIG, **fields}))
    return path


def stretched(folder: Path, sequences: list[Ids], frequencies: torch.Tensor) -> list[Doubles]:
    """transformers' hidden states, [L, hidden], with the frequencies of the older code."""
    model: Any = transformers.GteModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model.rotary_emb.inv_freq = frequencies
    with torch.inference_mode():
        return [model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0].numpy() for ids in sequences]


@pytest.mark.parametrize(
    ("model_type", "case", "factor", "theta"),
    [("gte", "gte", 2.0, 160_000), ("new", "gte", 8.0, 20_000), ("new", "gte, untyped", 2.0, 500_000)],
)
def test_fixed_ntk(tmp_path: Path, model_type: str, case: str, factor: float, theta: float) -> None:
    """Follows NTKScalingRotaryEmbedding: a larger θ, then slower by one factor for every length of text."""
    folder = build(tmp_path, case)
    sequences = random_sequences(LENGTHS, 60)
    frequencies = 1 / (theta * factor) ** (torch.arange(0, 16, 2).float() / 16) / factor ** (2 / 16)
    expected = stretched(folder, sequences, frequencies)
    stated = json.loads((folder / "config.json").read_text())
    written(
        folder / "config.json", model_type=model_type, rope_theta=theta, rope_scaling={"type": "ntk", "factor": factor},
        type_vocab_size=stated["type_vocab_size"], hidden_act=stated["hidden_act"],
    )  # fmt: skip
    read = read_config(folder / "config.json")
    assert (read.model_type, read.attention) == (model_type, (Attention(Rotary(theta, 16, Ntk(factor))),) * 2)
    assert near(folder, sequences, expected) >= 0.999999


@pytest.mark.parametrize(
    "fields", [{"rope_scaling": None}, {"rope_scaling": {"rope_type": "ntk", "factor": 1}}], ids=str
)
def test_own_spelling_without_scaling(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = build(tmp_path, "gte")
    sequences = random_sequences(LENGTHS, 60)
    expected = hidden_states(folder, sequences)
    written(folder / "config.json", **fields)
    assert near(folder, sequences, expected) >= 0.999999


def test_position_table(tmp_path: Path) -> None:
    folder = build(tmp_path, "gte")
    table = torch.randn(128, 64, generator=torch.Generator().manual_seed(0)) * 0.3
    model: Any = transformers.GteModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model.rotary_emb.inv_freq = torch.zeros(8)
    sequences, expected = random_sequences(LENGTHS, 60), []
    for ids in sequences:
        with torch.inference_mode():
            given = model.embeddings.word_embeddings(torch.from_numpy(ids.astype(np.int64)))[None]
            given = given + table[: len(ids)].double()
            expected.append(model(inputs_embeds=given).last_hidden_state[0].numpy())
    path = folder / "model.safetensors"
    save_file({**load_file(path), "embeddings.position_embeddings.weight": table}, path, {"format": "pt"})
    written(folder / "config.json", position_embedding_type="absolute")
    assert near(folder, sequences, expected) >= 0.999999


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("gte.", "new."): tensor for name, tensor in tensors.items()}


def separate(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name in [name for name in tensors if "qkv_proj" in name]:
        parts = zip("qkv", tensors.pop(name).chunk(3), strict=True)
        tensors |= {name.replace("qkv", kind): part.clone() for kind, part in parts}
    return tensors


@pytest.mark.parametrize("change", [renamed, separate])
@pytest.mark.parametrize("head", READS)
def test_own_names_of_tensors(tmp_path: Path, head: str, change: Callable[[Any], Any]) -> None:
    """They give the bits of transformers' names, in the encoder and in heads."""
    folder = build(tmp_path, "gte", head=head, modules=False, tokenizer=small_tokenizer(64))
    path = folder / "model.safetensors"

    def rename() -> None:
        save_file(change(load_file(path)), path, {"format": "pt"})
        written(folder / "config.json", architectures=[f"New{head}"], rope_scaling=None, pack_qkv=change != separate)

    has_the_same_outputs(folder, head, rename)


def test_activation_of_the_masked_lm_head(tmp_path: Path) -> None:
    """transformers fixes it, the older code does not."""
    folder = build(tmp_path, "gte", head="ForMaskedLM", modules=False, hidden_act="silu", tokenizer=small_tokenizer(64))
    for activation in ("gelu", "silu"):
        sparse: Any = engine.load_model(str(folder), pooling="splade").heads.sparse
        assert sparse.transform.activation == activation
        written(folder / "config.json", architectures=["NewForMaskedLM"], hidden_act="silu")
