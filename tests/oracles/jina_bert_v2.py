"""JinaBERT v2, which has no class in transformers: random weights, and what its own code computes of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch
from safetensors.torch import save_file

from tests.oracles.exact import Doubles, Ids
from tests.oracles.model_cases import write_modules

__all__ = ["CONFIG", "HIDDEN", "VOCABULARY", "JinaBert"]

HIDDEN, INNER, VOCABULARY, EPSILON = 48, 80, 64, 1e-12
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"geglu": F.gelu, "reglu": F.relu, "original": F.gelu}
CONFIG = {
    "model_type": "bert", "architectures": ["JinaBertForMaskedLM"], "position_embedding_type": "alibi",
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": 6,
    "max_position_embeddings": 8192, "type_vocab_size": 2, "vocab_size": VOCABULARY, "layer_norm_eps": EPSILON,
    "hidden_act": "gelu", "feed_forward_type": "geglu", "emb_pooler": "mean", "attn_implementation": "torch",
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
}  # fmt: skip


class JinaBert:
    """Random weights under the names of jinaai/jina-bert-implementation, and what its code computes of them."""

    def __init__(self, folder: Path, *, kind: str = "geglu", heads: int = 6, **config: Any) -> None:
        self.folder, self.kind, self.heads = folder, kind, heads
        self._random = torch.Generator().manual_seed(0)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, rows in (("word", VOCABULARY), ("token_type", 2)):
            self.tensors[f"embeddings.{name}_embeddings.weight"] = self._drawn(rows, HIDDEN)
        self._norm("embeddings.LayerNorm")
        for layer in range(2):
            at = f"encoder.layer.{layer}."
            for name in ("self.query", "self.key", "self.value", "output.dense"):
                self._linear(f"{at}attention.{name}", HIDDEN, HIDDEN)
            self._norm(f"{at}attention.output.LayerNorm")
            if kind == "original":
                self._linear(f"{at}intermediate.dense", INNER, HIDDEN)
                self._linear(f"{at}output.dense", HIDDEN, INNER)
                self._norm(f"{at}output.LayerNorm")
            else:
                self.tensors[f"{at}mlp.gated_layers.weight"] = self._drawn(2 * INNER, HIDDEN)
                self._linear(f"{at}mlp.wo", HIDDEN, INNER)
                self._norm(f"{at}mlp.layernorm")
        fields = {**CONFIG, "feed_forward_type": kind, "num_attention_heads": heads, **config}
        (folder / "config.json").write_text(json.dumps(fields))
        write_modules(folder)
        self.save()

    def save(self, prefix: str = "", more: Mapping[str, torch.Tensor] | None = None) -> None:
        stored = {prefix + name: tensor for name, tensor in self.tensors.items()}
        save_file({**stored, **(more or {})}, self.folder / "model.safetensors", {"format": "pt"})

    def _drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random) * 0.3

    def _linear(self, name: str, outputs: int, inputs: int) -> None:
        self.tensors |= {f"{name}.weight": self._drawn(outputs, inputs), f"{name}.bias": self._drawn(outputs)}

    def _norm(self, name: str) -> None:
        self.tensors |= {f"{name}.weight": 1 + self._drawn(HIDDEN), f"{name}.bias": self._drawn(HIDDEN)}

    def hidden(self, ids: Ids, types: Ids | None = None, dtype: torch.dtype = torch.float64) -> Doubles:
        """int32 [L] → float64 [L, hidden], computed in `dtype`."""
        stored = {name: tensor.to(dtype) for name, tensor in self.tensors.items()}

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.linear(x, stored[f"{name}.weight"], stored.get(f"{name}.bias"))

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.layer_norm(x, (HIDDEN,), stored[f"{name}.weight"], stored[f"{name}.bias"], EPSILON)

        length = len(ids)
        distances = (torch.arange(length)[None] - torch.arange(length)[:, None]).abs()
        alibi = -torch.tensor(slopes(self.heads), dtype=dtype)[:, None, None] * distances
        kinds = torch.zeros(length, dtype=torch.long) if types is None else torch.from_numpy(types.astype(np.int64))
        x = stored["embeddings.word_embeddings.weight"][torch.from_numpy(ids.astype(np.int64))]
        x = norm(x + stored["embeddings.token_type_embeddings.weight"][kinds], "embeddings.LayerNorm")
        act = ACTIVATIONS[self.kind]
        for layer in range(2):
            at = f"encoder.layer.{layer}."
            q, k, v = (
                linear(x, f"{at}attention.self.{name}").view(length, self.heads, -1).transpose(0, 1)
                for name in ("query", "key", "value")
            )
            weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + alibi).softmax(-1)
            context = (weights @ v).transpose(0, 1).reshape(length, HIDDEN)
            x = norm(linear(context, f"{at}attention.output.dense") + x, f"{at}attention.output.LayerNorm")
            if self.kind == "original":
                inner = act(linear(x, f"{at}intermediate.dense"))
                x = norm(linear(inner, f"{at}output.dense") + x, f"{at}output.LayerNorm")
            else:
                both = linear(x, f"{at}mlp.gated_layers")
                gated, plain = both[:, :INNER], both[:, INNER:]
                x = norm(linear(act(gated) * plain, f"{at}mlp.wo") + x, f"{at}mlp.layernorm")
        found: Doubles = x.double().numpy()
        return found


def slopes(heads: int) -> list[float]:
    """Slopes of the paper's code: those of a power of two, then every second of the next power's."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    power = 2 ** math.floor(math.log2(heads))
    return slopes(power) + slopes(2 * power)[0::2][: heads - power]
