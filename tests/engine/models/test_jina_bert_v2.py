"""JinaBERT v2, for which transformers has no class: its formulas in float64, written here from its authors' code."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch
from safetensors.torch import save_file

from embert import engine
from embert.engine.errors import BrokenModel
from embert.engine.tasks import Task
from tests.engine.conftest import Ids, random_sequences, small_tokenizer
from tests.engine.models.exact import Doubles, cosines, near
from tests.oracles.model_cases import byte_level, write_modules
from tests.server.models import edit_json

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
    """As the paper's code: a power of two's own, and every second of the next power's for the rest."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    power = 2 ** math.floor(math.log2(heads))
    return slopes(power) + slopes(2 * power)[0::2][: heads - power]


@pytest.mark.parametrize(("kind", "heads"), [("geglu", 6), ("geglu", 12), ("reglu", 8), ("original", 1)])
def test_hidden_states(tmp_path: Path, kind: str, heads: int) -> None:
    reference = JinaBert(tmp_path, kind=kind, heads=heads)
    sequences = random_sequences([1, 2, 17, 33, 64, 65, 128, 300, 5], VOCABULARY)
    assert near(tmp_path, sequences, list(map(reference.hidden, sequences))) >= 0.999999
    model = engine.load_model(str(tmp_path))
    assert (model.config.model_type, model.config.max_positions) == ("jina_bert_v2", 8192)
    types = random_sequences([17], 2, seed=1)
    encoder = engine.load_encoder(model, device="cpu")
    ours = encoder.encode(engine.pack(sequences[2:3], token_types=types), Task.TOKENS)
    assert cosines(ours, reference.hidden(sequences[2], types[0])).min() >= 0.999999


@pytest.mark.parametrize(("dtype", "cosine"), [("float32", 0.999999), ("bfloat16", 0.995)])
def test_long_texts(tmp_path: Path, dtype: str, cosine: float) -> None:
    reference = JinaBert(tmp_path)
    sequences = random_sequences([1100, 20], VOCABULARY)
    assert near(tmp_path, sequences, list(map(reference.hidden, sequences)), dtype=dtype) >= cosine


def test_classifier_under_a_prefix(tmp_path: Path) -> None:
    """A reranker's file: the encoder under "bert.", BERT's pooler, and a classifier."""
    reference = JinaBert(tmp_path, architectures=["JinaBertForSequenceClassification"], num_labels=1)
    (tmp_path / "modules.json").unlink()
    small_tokenizer(VOCABULARY).save(str(tmp_path / "tokenizer.json"))
    drawn = torch.Generator().manual_seed(3)
    shapes = {
        "bert.pooler.dense.weight": (HIDDEN, HIDDEN),
        "bert.pooler.dense.bias": (HIDDEN,),
        "classifier.bias": (1,),
    }
    head = {name: torch.randn(*shape, generator=drawn) for name, shape in shapes.items()}
    head["classifier.weight"] = torch.randn(1, HIDDEN, generator=drawn)
    reference.save("bert.", head)
    sequences = random_sequences([4, 40], VOCABULARY)
    logits = engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu").encode(
        engine.pack(sequences), Task.CLASSIFY
    )
    exact = {name: tensor.double().numpy() for name, tensor in head.items()}
    for ours, ids in zip(logits, sequences, strict=True):
        pooled = np.tanh(exact["bert.pooler.dense.weight"] @ reference.hidden(ids)[0] + exact["bert.pooler.dense.bias"])
        np.testing.assert_allclose(ours, exact["classifier.weight"] @ pooled + exact["classifier.bias"], atol=1e-4)


def test_query_norms_in_the_weights_are_refused(tmp_path: Path) -> None:
    reference = JinaBert(tmp_path)
    byte_level(300).save(str(tmp_path / "tokenizer.json"))
    name = "encoder.layer.0.attention.self.layer_norm_q.weight"
    reference.save(more={name: torch.ones(HIDDEN)})
    with pytest.raises(BrokenModel, match=f"has a tensor {name}, which config.json does not describe"):
        engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu")
    edit_json(tmp_path / "config.json", feed_forward_type="original")
    with pytest.raises(BrokenModel, match=r"has no tensor encoder\.layer\.0\.intermediate\.dense\.weight"):
        engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu")
