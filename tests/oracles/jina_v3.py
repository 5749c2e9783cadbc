"""jina-embeddings-v3 with random weights and adapters, in both kinds of files, and transformers' class to compare with.

The oracle of an adapter is the class with scale · left · right added to its weights, in float64.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from safetensors.torch import save_file

from tests.oracles.model_cases import byte_level, write_modules

TASKS = ("retrieval.query", "retrieval.passage", "separation", "classification", "text-matching")
INSTRUCTIONS = {"retrieval.query": "query: ", "retrieval.passage": "text: "}
RANK, ALPHA, THETA, VOCABULARY = 4, 6.0, 20000.0, 300
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 128, "type_vocab_size": 2,
}  # fmt: skip
TABLES = ("embeddings.word_embeddings", "embeddings.token_type_embeddings")
LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.fc1", "mlp.fc2")
MODULES = (*TABLES, *(f"layers.{layer}.{name}" for layer in range(2) for name in LINEAR))
FLASH = {
    "layers.": "encoder.layers.", "self_attn.o_proj": "mixer.out_proj", "embeddings.LayerNorm": "emb_ln",
    "post_attention_layernorm": "norm1", "post_mlp_layernorm": "norm2",
}  # fmt: skip

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Jina:
    """A model folder, and what is in it."""

    folder: Path
    weights: Tensors  # transformers' own names
    low_rank: dict[str, tuple[torch.Tensor, torch.Tensor]]  # a module → [5, rows, rank] and [5, rank, columns]

    @cache  # noqa: B019 - a few small models
    def _model(self, task: str | None, dtype: torch.dtype) -> torch.nn.Module:
        weights = {name: tensor.double() for name, tensor in self.weights.items()}
        for module, (left, right) in self.low_rank.items():
            if task is not None:
                number = TASKS.index(task)
                weights[f"{module}.weight"] += ALPHA / RANK * left[number].double() @ right[number].double()
        model: torch.nn.Module = _made().double()
        model.load_state_dict(weights)
        return torch.nn.Module.to(model, dtype).eval()  # transformers' own `to` has no type

    def hidden(
        self,
        ids: npt.NDArray[Any],
        task: str | None,
        token_types: npt.NDArray[Any] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> npt.NDArray[np.float64]:
        """The last hidden state of one text, computed in `dtype`: float64 [L, hidden]."""
        types = np.zeros_like(ids) if token_types is None else token_types
        given = (torch.from_numpy(each[None].astype(np.int64)) for each in (ids, types))
        with torch.inference_mode():
            rows = self._model(task, dtype)(input_ids=(next(given)), token_type_ids=next(given)).last_hidden_state[0]
        found: npt.NDArray[np.float64] = rows.double().numpy()
        return found


def _made() -> Any:
    rope = {"rope_type": "default", "rope_theta": THETA}
    config = transformers.JinaEmbeddingsV3Config(**SHAPE, rope_parameters=rope, initializer_range=0.3)
    return transformers.JinaEmbeddingsV3Model(config, add_pooling_layer=False)


def _random(folder: Path, *, shared: bool) -> Jina:
    """If `shared`, query, key and value have one right side."""
    torch.manual_seed(0)
    model = _made()
    for name, parameter in model.named_parameters():
        if "norm" in name.lower() or name.endswith(("bias", "_embeddings.weight")):
            parameter.data += torch.randn_like(parameter) * 0.2
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    low_rank: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in MODULES:
        rows, columns = weights[f"{module}.weight"].shape
        right = torch.randn(5, RANK, columns) * 0.1
        if shared and module.endswith(("k_proj", "v_proj")):
            right = low_rank[module.replace("k_proj", "q_proj").replace("v_proj", "q_proj")][1]
        low_rank[module] = torch.randn(5, rows, RANK) * 0.3, right
    folder.mkdir(parents=True, exist_ok=True)
    byte_level(VOCABULARY).save(str(folder / "tokenizer.json"))
    write_modules(folder)
    return Jina(folder, weights, low_rank)


def flash(folder: Path, **config: Any) -> Jina:
    """Writes the files of jina's repository. `config` is more of config.json."""
    made = _random(folder, shared=True)
    stored: Tensors = {}

    def named(name: str) -> str:
        for ours, theirs in FLASH.items():
            name = name.replace(ours, theirs)
        return f"roberta.{name}"

    for name, tensor in made.weights.items():
        module, _, kind = name.rpartition(".")
        if "q_proj" in name:
            tensor = torch.cat([made.weights[name.replace("q_proj", f"{each}_proj")] for each in "qkv"])
        if "k_proj" in name or "v_proj" in name:
            continue
        module = named(module).replace("self_attn.q_proj", "mixer.Wqkv")
        if kind == "weight" and name.removesuffix(".weight") in MODULES:
            kind = "parametrizations.weight.original"
        stored[f"{module}.{kind}"] = tensor
    for module, (left, right) in made.low_rank.items():
        if module.endswith(("k_proj", "v_proj")):
            continue
        if module.endswith("q_proj"):
            left = torch.cat([made.low_rank[module.replace("q_proj", f"{each}_proj")][0] for each in "qkv"], 1)
        at = named(module).replace("self_attn.q_proj", "mixer.Wqkv") + ".parametrizations.weight.0.lora_"
        a, b = (left, right) if module in TABLES else (right, left)
        stored[at + "A"], stored[at + "B"] = a.contiguous(), b.contiguous()
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "custom_st.Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    written = {
        "model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "position_embedding_type": "rotary",
        "rotary_emb_base": THETA, "lora_adaptations": TASKS, "lora_rank": RANK, "lora_alpha": ALPHA,
        "load_trained_adapters": True, "lora_main_params_trainable": False, "truncate_dim": None,
        "task_instructions": {task: INSTRUCTIONS.get(task, "") for task in TASKS}, "hidden_act": "gelu",
        "matryoshka_dimensions": [32, 64], "layer_norm_eps": 1e-5, "pad_token_id": 1, **SHAPE,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**written, **config}))
    return made


def peft(folder: Path, *, without: tuple[str, ...] = (), **adapter: Any) -> Jina:
    """Writes the files of transformers: other names, and a folder for each adapter.

    Adapters add nothing to modules whose name ends in one of `without`. `adapter` is more of adapter_config.json.
    """
    made = _random(folder, shared=False)
    made = Jina(folder, made.weights, {n: pair for n, pair in made.low_rank.items() if not n.endswith(without or "?")})
    save_file(made.weights, folder / "model.safetensors")
    _made().config.save_pretrained(folder)
    for number, task in enumerate(TASKS):
        own = folder / task.replace(".", "_").replace("-", "_")
        own.mkdir()
        facts = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": "all-linear"}
        (own / "adapter_config.json").write_text(json.dumps({**facts, **adapter}))
        tensors: Tensors = {}
        for module, (left, right) in made.low_rank.items():
            if module in TABLES:
                a, b, kinds = left[number].T, right[number].T, ("lora_embedding_A", "lora_embedding_B")
            else:
                a, b, kinds = right[number], left[number], ("lora_A.weight", "lora_B.weight")
            tensors |= {
                f"base_model.model.{module}.{kind}": x.contiguous() for kind, x in zip(kinds, (a, b), strict=True)
            }
        save_file(tensors, own / "adapter_model.safetensors")
    return made
