"""JinaBERT v2, which has no class in transformers: random weights, and what its own code computes of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from tests.oracles.exact import Doubles, Ids
from tests.oracles.model_cases import write_modules
from tests.oracles.own_code import OwnCode, attend

HIDDEN, INNER, VOCABULARY, EPSILON = 48, 80, 64, 1e-12
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"geglu": F.gelu, "reglu": F.relu, "original": F.gelu}
CONFIG = {
    "model_type": "bert", "architectures": ["JinaBertForMaskedLM"], "position_embedding_type": "alibi",
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 6,
    "max_position_embeddings": 8192, "type_vocab_size": 2, "vocab_size": VOCABULARY, "layer_norm_eps": EPSILON,
    "hidden_act": "gelu", "feed_forward_type": "geglu", "emb_pooler": "mean", "attn_implementation": "torch",
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
}  # fmt: skip


class JinaBert(OwnCode):
    """Random weights under the names of jinaai/jina-bert-implementation, and what its code computes of them."""

    def __init__(self, folder: Path, *, kind: str = "geglu", heads: int = 6, **config: Any) -> None:
        super().__init__(folder, HIDDEN)
        self.kind, self.heads = kind, heads
        for name, rows in (("word", VOCABULARY), ("token_type", 2)):
            self.draw(f"embeddings.{name}_embeddings.weight", rows, HIDDEN)
        self.draw_norm("embeddings.LayerNorm")
        for layer in range(2):
            at = f"encoder.layer.{layer}."
            for name in ("self.query", "self.key", "self.value", "output.dense"):
                self.draw_linear(f"{at}attention.{name}", HIDDEN, HIDDEN)
            self.draw_norm(f"{at}attention.output.LayerNorm")
            if kind == "original":
                self.draw_linear(f"{at}intermediate.dense", INNER, HIDDEN)
                self.draw_linear(f"{at}output.dense", HIDDEN, INNER)
                self.draw_norm(f"{at}output.LayerNorm")
            else:
                self.draw_linear(f"{at}mlp.gated_layers", 2 * INNER, HIDDEN, bias=False)
                self.draw_linear(f"{at}mlp.wo", HIDDEN, INNER)
                self.draw_norm(f"{at}mlp.layernorm")
        fields = {**CONFIG, "feed_forward_type": kind, "num_attention_heads": heads, **config}
        (folder / "config.json").write_text(json.dumps(fields))
        write_modules(folder)
        self.save()

    def hidden(self, ids: Ids, types: Ids | None = None, dtype: torch.dtype = torch.float64) -> Doubles:
        """int32 [L] → float64 [L, hidden], computed in `dtype`."""
        length, act = len(ids), ACTIVATIONS[self.kind]
        distances = (torch.arange(length)[None] - torch.arange(length)[:, None]).abs()
        alibi = -torch.tensor(slopes(self.heads), dtype=dtype)[:, None, None] * distances
        x = self.rows("word", ids, dtype) + self.rows("token_type", ids * 0 if types is None else types, dtype)
        x = self.norm(x, "embeddings.LayerNorm")
        for layer in range(2):
            at = f"encoder.layer.{layer}."
            q, k, v = (
                self.linear(x, f"{at}attention.self.{name}").view(length, self.heads, -1).transpose(0, 1)
                for name in ("query", "key", "value")
            )
            context = self.linear(attend(q, k, v, alibi), f"{at}attention.output.dense")
            x = self.norm(context + x, f"{at}attention.output.LayerNorm")
            if self.kind == "original":
                inner = act(self.linear(x, f"{at}intermediate.dense"))
                x = self.norm(self.linear(inner, f"{at}output.dense") + x, f"{at}output.LayerNorm")
            else:
                gated, plain = self.linear(x, f"{at}mlp.gated_layers").chunk(2, 1)
                x = self.norm(self.linear(act(gated) * plain, f"{at}mlp.wo") + x, f"{at}mlp.layernorm")
        found: Doubles = x.double().numpy()
        return found


def slopes(heads: int) -> list[float]:
    """Slopes of the paper's code: those of a power of two, then every second of the next power's."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    power = 2 ** math.floor(math.log2(heads))
    return slopes(power) + slopes(2 * power)[0::2][: heads - power]
