"""nomic-bert as its own code stores it: random weights, and what that code computes of them in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from tests.oracles.exact import Doubles, Ids
from tests.oracles.model_cases import small_tokenizer
from tests.oracles.own_code import OwnCode, attend

COLUMNS, HEADS, VOCABULARY = 48, 3, 96
# As nomic-embed-text-v1.5's, smaller.
CONFIG: dict[str, Any] = {
    "model_type": "nomic_bert", "architectures": ["NomicBertModel"], "activation_function": "swiglu", "attn_pdrop": 0.0,
    "causal": False, "dense_seq_output": True, "embd_pdrop": 0.0, "fused_bias_fc": True, "fused_dropout_add_ln": True,
    "layer_norm_epsilon": 1e-12, "max_trained_positions": 64, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
    "n_embd": COLUMNS, "n_head": HEADS, "n_inner": 256, "n_layer": 2, "n_positions": 128, "pad_vocab_size_multiple": 32,
    "parallel_block": False, "parallel_block_tied_norm": False, "prenorm": False, "qkv_proj_bias": False,
    "resid_pdrop": 0.0, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "type_vocab_size": 2, "use_flash_attn": True,
    "use_rms_norm": False, "use_xentropy": True, "vocab_size": VOCABULARY,
}  # fmt: skip
# The fields of nomic-embed-text-v2-moe with smaller values.
EXPERTS: dict[str, Any] = {
    "activation_function": "gelu", **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True),
    "expert_choice_router": False, "ffn_div": 1, "moe_every_n_layers": 2, "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False, "moe_top_k": 2, "num_experts": 5, "num_shared_experts": 0,
    "rotary_emb_base": 10_000, "type_vocab_size": 1,
}  # fmt: skip


class Older(OwnCode):
    """Random weights under the names of nomic-ai/nomic-bert-2048, and what its code computes of them."""

    def __init__(self, folder: Path, *, inner: int = 256, **config: Any) -> None:
        super().__init__(folder, COLUMNS)
        is_ = self.config = {**CONFIG, **config}
        self.gated = is_["activation_function"] != "gelu"
        self.draw("embeddings.word_embeddings.weight", VOCABULARY, COLUMNS)
        if is_["type_vocab_size"]:
            self.draw("embeddings.token_type_embeddings.weight", is_["type_vocab_size"], COLUMNS)
        if not is_["rotary_emb_fraction"]:
            self.draw("embeddings.position_embeddings.weight", is_["n_positions"], COLUMNS)
        self.draw_norm("emb_ln")
        for layer in range(2):
            at = f"encoder.layers.{layer}."
            self.draw_linear(f"{at}attn.Wqkv", 3 * COLUMNS, COLUMNS, bias=is_["qkv_proj_bias"])
            self.draw_linear(f"{at}attn.out_proj", COLUMNS, COLUMNS, bias=is_["qkv_proj_bias"])
            if self._is_routed(layer):
                self.draw_linear(f"{at}mlp.router.layer", is_["num_experts"], COLUMNS, bias=False)
                for name in ("w1", "w2"):
                    self.draw(f"{at}mlp.experts.mlp.{name}", is_["num_experts"] * inner, COLUMNS)
                self.draw(f"{at}mlp.experts.bias", COLUMNS)
            else:
                for name in ("fc11", "fc12") if self.gated else ("fc1",):
                    self.draw_linear(f"{at}mlp.{name}", inner, COLUMNS, bias=is_["mlp_fc1_bias"])
                self.draw_linear(f"{at}mlp.fc2", COLUMNS, inner, bias=is_["mlp_fc2_bias"])
            self.draw_norm(f"{at}norm1")
            self.draw_norm(f"{at}norm2")
        (folder / "config.json").write_text(json.dumps(self.config))
        small_tokenizer(VOCABULARY).save(str(folder / "tokenizer.json"))
        self.save()

    def _is_routed(self, layer: int) -> bool:
        every: int = self.config.get("moe_every_n_layers", 0)
        return every > 0 and layer % every == 1

    def routed(self, x: torch.Tensor, at: str) -> torch.Tensor:
        """The outputs of each token's experts, one token at a time."""
        stored = {name: tensor.to(x.dtype) for name, tensor in self.tensors.items()}
        first, second = (stored[f"{at}experts.mlp.{name}"].chunk(self.config["num_experts"]) for name in ("w1", "w2"))
        shares, numbers = self.linear(x, f"{at}router.layer").softmax(-1).topk(self.config["moe_top_k"])
        y = stored[f"{at}experts.bias"].repeat(len(x), 1)
        for token, row in enumerate(x):
            for share, number in zip(shares[token], numbers[token].tolist(), strict=True):
                y[token] += share * (F.gelu(row @ first[number].T) @ second[number])
        return y

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """[heads, L, columns of a head] by their positions."""
        is_, length = self.config, x.shape[1]
        columns = int(is_["rotary_emb_fraction"] * x.shape[2])
        base, factor, trained = is_["rotary_emb_base"], is_["rotary_scaling_factor"], is_["max_trained_positions"]
        if factor and length > trained:
            base *= (factor * length / trained - (factor - 1)) ** (columns / (columns - 2))
        frequencies = 1 / base ** (torch.arange(0, columns, 2, dtype=torch.float64) / columns)
        angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
        first, second, rest = x[..., : columns // 2], x[..., columns // 2 : columns], x[..., columns:]
        cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines, rest], 2)

    def hidden(self, ids: Ids, types: Ids | None = None, dtype: torch.dtype = torch.float64) -> Doubles:
        """int32 [L] → float64 [L, columns], computed in `dtype`."""
        length, is_ = len(ids), self.config
        x = self.rows("word", ids, dtype)
        if is_["type_vocab_size"]:
            x = x + self.rows("token_type", ids * 0 if types is None else types, dtype)
        if not is_["rotary_emb_fraction"]:
            x = x + self.rows("position", np.arange(length, dtype=np.int32), dtype)
        x = self.norm(x, "emb_ln")
        for layer in range(2):
            at = f"encoder.layers.{layer}."
            q, k, v = (
                each.view(length, HEADS, -1).transpose(0, 1)
                for each in self.linear(x, f"{at}attn.Wqkv").chunk(3, dim=1)
            )
            if is_["rotary_emb_fraction"]:
                q, k = self.turned(q), self.turned(k)
            x = self.norm(self.linear(attend(q, k, v), f"{at}attn.out_proj") + x, f"{at}norm1")
            if self._is_routed(layer):
                x = self.norm(self.routed(x, f"{at}mlp.") + x, f"{at}norm2")
                continue
            if self.gated:
                act = F.silu if is_["activation_function"] == "swiglu" else F.gelu
                inner = self.linear(x, f"{at}mlp.fc11") * act(self.linear(x, f"{at}mlp.fc12"))
            else:
                inner = F.gelu(self.linear(x, f"{at}mlp.fc1"))
            x = self.norm(self.linear(inner, f"{at}mlp.fc2") + x, f"{at}norm2")
        found: Doubles = x.double().numpy()
        return found
