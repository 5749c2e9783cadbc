"""nomic-bert: transformers' spelling beside transformers, the older code's beside its formulas, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch
import transformers
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine.errors import ModelError
from embert.engine.models import read_config
from embert.engine.models.encoder_config import Attention, DynamicNtk, Rotary
from embert.engine.tasks import Task
from tests.engine.conftest import Ids, random_sequences, small_tokenizer, write_modules
from tests.engine.model_cases import build
from tests.engine.models.exact import Doubles, cosines, hidden_states, near
from tests.engine.models.own_names import check_own_names
from tests.server.models import edit_json

LENGTHS = [1, 2, 17, 33, 64, 65, 128, 5]
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


class Older:
    """Random weights under the names of nomic-ai/nomic-bert-2048, and what its code computes of them."""

    def __init__(self, folder: Path, *, inner: int = 256, **config: Any) -> None:
        self.folder, self.config, self._inner = folder, {**CONFIG, **config}, inner
        self._random = torch.Generator().manual_seed(0)
        is_ = self.config
        self.gated = is_["activation_function"] != "gelu"
        self.tensors = {"embeddings.word_embeddings.weight": self._drawn(VOCABULARY, COLUMNS)}
        if is_["type_vocab_size"]:
            self.tensors["embeddings.token_type_embeddings.weight"] = self._drawn(2, COLUMNS)
        if not is_["rotary_emb_fraction"]:
            self.tensors["embeddings.position_embeddings.weight"] = self._drawn(is_["n_positions"], COLUMNS)
        self._norm("emb_ln")
        for layer in range(2):
            at = f"encoder.layers.{layer}."
            self._linear(f"{at}attn.Wqkv", 3 * COLUMNS, COLUMNS, bias=is_["qkv_proj_bias"])
            self._linear(f"{at}attn.out_proj", COLUMNS, COLUMNS, bias=is_["qkv_proj_bias"])
            for name in ("fc11", "fc12") if self.gated else ("fc1",):
                self._linear(f"{at}mlp.{name}", inner, COLUMNS, bias=is_["mlp_fc1_bias"])
            self._linear(f"{at}mlp.fc2", COLUMNS, inner, bias=is_["mlp_fc2_bias"])
            self._norm(f"{at}norm1")
            self._norm(f"{at}norm2")
        (folder / "config.json").write_text(json.dumps(self.config))
        small_tokenizer(VOCABULARY).save(str(folder / "tokenizer.json"))
        self.save()

    def save(self, prefix: str = "", **more: torch.Tensor) -> None:
        stored = {prefix + name: tensor for name, tensor in self.tensors.items()}
        save_file({**stored, **more}, self.folder / "model.safetensors", {"format": "pt"})

    def _drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random) * 0.3

    def _linear(self, name: str, outputs: int, inputs: int, *, bias: bool) -> None:
        self.tensors[f"{name}.weight"] = self._drawn(outputs, inputs)
        if bias:
            self.tensors[f"{name}.bias"] = self._drawn(outputs)

    def _norm(self, name: str) -> None:
        self.tensors |= {f"{name}.weight": 1 + self._drawn(COLUMNS), f"{name}.bias": self._drawn(COLUMNS)}

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
        cosines, sines = angles.cos(), angles.sin()
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines, rest], 2)

    def hidden(self, ids: Ids, types: Ids | None = None) -> Doubles:
        """int32 [L] → float64 [L, columns]."""
        stored = {name: tensor.double() for name, tensor in self.tensors.items()}

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.linear(x, stored[f"{name}.weight"], stored.get(f"{name}.bias"))

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.layer_norm(x, (COLUMNS,), stored[f"{name}.weight"], stored[f"{name}.bias"], 1e-12)

        length, is_ = len(ids), self.config
        x = stored["embeddings.word_embeddings.weight"][torch.from_numpy(ids.astype(np.int64))]
        if is_["type_vocab_size"]:
            kinds = np.zeros(length, np.int64) if types is None else types.astype(np.int64)
            x = x + stored["embeddings.token_type_embeddings.weight"][torch.from_numpy(kinds)]
        if not is_["rotary_emb_fraction"]:
            x = x + stored["embeddings.position_embeddings.weight"][:length]
        x = norm(x, "emb_ln")
        for layer in range(2):
            at = f"encoder.layers.{layer}."
            q, k, v = (
                each.view(length, HEADS, -1).transpose(0, 1) for each in linear(x, f"{at}attn.Wqkv").chunk(3, dim=1)
            )
            if is_["rotary_emb_fraction"]:
                q, k = self.turned(q), self.turned(k)
            weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[2])).softmax(-1)
            context = (weights @ v).transpose(0, 1).reshape(length, COLUMNS)
            x = norm(linear(context, f"{at}attn.out_proj") + x, f"{at}norm1")
            if self.gated:
                act = F.silu if is_["activation_function"] == "swiglu" else F.gelu
                inner = linear(x, f"{at}mlp.fc11") * act(linear(x, f"{at}mlp.fc12"))
            else:
                inner = F.gelu(linear(x, f"{at}mlp.fc1"))
            x = norm(linear(inner, f"{at}mlp.fc2") + x, f"{at}norm2")
        found: Doubles = x.numpy()
        return found


BIASES = dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rotary_scaling_factor": 2},
        {"rotary_scaling_factor": 2, "rotary_emb_fraction": 0.5},
        {"rotary_emb_fraction": 0.0, "type_vocab_size": 0},
        {"activation_function": "geglu", **BIASES},
        {"activation_function": "gelu", **BIASES, "n_inner": None, "inner": 4 * COLUMNS},
        {"n_inner": 300, "inner": 512},
        {"n_inner": None, "inner": 256, "vocab_size": 70},
    ],
    ids=str,
)
def test_the_older_code(tmp_path: Path, config: dict[str, Any]) -> None:
    reference = Older(tmp_path, **config)
    write_modules(tmp_path)
    sequences = random_sequences(LENGTHS, VOCABULARY)
    assert near(tmp_path, sequences, list(map(reference.hidden, sequences))) >= 0.999999
    if reference.config["type_vocab_size"]:
        types = random_sequences([33], 2, seed=1)
        encoder = engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu")
        ours = encoder.encode(engine.pack(sequences[3:4], token_types=types), Task.TOKENS)
        assert cosines(ours, reference.hidden(sequences[3], types[0])).min() >= 0.999999


def test_both_kinds_of_keys_are_one_architecture(tmp_path: Path) -> None:
    """The older spelling of what transformers' own class computes: its tensors lie under the older names anyway."""
    folder = build(tmp_path, "nomic_bert, dynamic", intermediate_size=256)
    own = read_config(folder / "config.json")
    sequences = random_sequences(LENGTHS, 60)
    expected = hidden_states(folder, sequences)
    names = {"n_embd": 64, "n_head": 4, "n_inner": 256, "n_layer": 2, "vocab_size": 64, "rotary_scaling_factor": 2}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **names}))
    older = read_config(folder / "config.json")
    assert dataclasses.replace(older, tensors=own.tensors) == own  # but for biases of its heads
    assert near(folder, sequences, expected) >= 0.999999


def test_what_the_older_code_makes_of_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "rotary_scaling_factor": 2.0}))
    read = read_config(path)
    assert (read.model_type, read.max_positions, read.activation, read.gated) == ("nomic_bert", 128, "silu", True)
    assert read.attention == (Attention(Rotary(1000, 16, DynamicNtk(2, 64))),) * 2
    edit_json(path, max_trained_positions=None, rotary_emb_fraction=0.25)
    assert read_config(path).attention[0].rotary == Rotary(1000, 4, DynamicNtk(2, 2048))
    edit_json(path, rotary_emb_fraction=0)
    assert (read_config(path).attention, read_config(path).position_table) == ((), True)


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_transformers_own_tensor_names(tmp_path: Path, head: str) -> None:
    check_own_names(tmp_path, "nomic_bert", head)


def test_a_masked_language_model_of_the_older_code(tmp_path: Path) -> None:
    """Neither its dense layer nor its decoder has a bias."""
    reference = Older(tmp_path, architectures=["NomicBertForPreTraining"])
    at, drawn = "cls.predictions.transform", torch.Generator().manual_seed(1)
    head = {
        f"{at}.dense.weight": torch.randn(COLUMNS, COLUMNS, generator=drawn),
        f"{at}.layer_norm.weight": torch.randn(COLUMNS, generator=drawn),
        f"{at}.layer_norm.bias": torch.randn(COLUMNS, generator=drawn),
    }
    words = reference.tensors["embeddings.word_embeddings.weight"].double()
    for stored in ({}, {"cls.predictions.decoder.weight": torch.randn(VOCABULARY, COLUMNS, generator=drawn)}):
        reference.save("bert.", **head, **stored)
        encoder = engine.load_encoder(engine.load_model(str(tmp_path), pooling="splade"), device="cpu")
        ids = random_sequences([30], VOCABULARY)[0]
        rows = encoder.wait(encoder.submit(engine.pack([ids]).wanting(Task.SPARSE)))[Task.SPARSE]
        exact = {name: tensor.double() for name, tensor in head.items()}
        x = F.silu(torch.from_numpy(reference.hidden(ids)) @ exact[f"{at}.dense.weight"].T)
        x = F.layer_norm(x, (COLUMNS,), exact[f"{at}.layer_norm.weight"], exact[f"{at}.layer_norm.bias"], 1e-12)
        decoder = stored["cls.predictions.decoder.weight"].double() if stored else words
        weights = (x @ decoder.T).amax(0).relu().log1p().numpy()
        assert rows.indices is not None
        assert rows.indices.tolist() == np.nonzero(weights)[0].tolist()
        np.testing.assert_allclose(rows.values[:, 0], weights[weights > 0], atol=1e-5)


def test_a_classifier_of_the_older_code(tmp_path: Path) -> None:
    reference = Older(tmp_path, architectures=["NomicBertForSequenceClassification"], num_labels=2)
    drawn = torch.Generator().manual_seed(1)
    shapes = {
        "bert.pooler.dense.weight": (COLUMNS, COLUMNS),
        "bert.pooler.dense.bias": (COLUMNS,),
        "classifier.weight": (2, COLUMNS),
        "classifier.bias": (2,),
    }
    head = {name: torch.randn(*shape, generator=drawn) * 0.3 for name, shape in shapes.items()}
    reference.save("bert.", **head)
    encoder = engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu")
    sequences, types = random_sequences([9, 40], VOCABULARY), random_sequences([9, 40], 2, seed=1)
    logits = encoder.encode(engine.pack(sequences, token_types=types), Task.CLASSIFY)
    exact = {name: tensor.double().numpy() for name, tensor in head.items()}
    for ours, ids, kinds in zip(logits, sequences, types, strict=True):
        first = reference.hidden(ids, kinds)[0]
        pooled = np.tanh(exact["bert.pooler.dense.weight"] @ first + exact["bert.pooler.dense.bias"])
        np.testing.assert_allclose(ours, exact["classifier.weight"] @ pooled + exact["classifier.bias"], atol=1e-4)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("dtype", "cosine"), [("float32", 0.999999), ("bfloat16", 0.99)])
def test_long_texts(tmp_path: Path, dtype: str, cosine: float) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1000.0}
    folder = build(tmp_path, "nomic_bert", max_position_embeddings=2048, rope_parameters=rope)
    assert read_config(folder / "config.json").max_positions == 8192
    sequences = random_sequences([20, 600, 2100], 60)
    assert near(folder, sequences, hidden_states(folder, sequences, attn_implementation="sdpa"), dtype=dtype) >= cosine


def test_pairs_have_token_types(tmp_path: Path) -> None:
    folder = build(tmp_path, "nomic_bert", vocab_size=99, head="ForSequenceClassification", modules=False, num_labels=1)
    backend = small_tokenizer(99)
    backend.save(str(folder / "tokenizer.json"))
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    texts = ["a word", "", "some 3 more words"]
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        ranked = {each.index: each.score for each in loaded.rerank("what is it", texts)}
    for index, text in enumerate(texts):
        found = backend.encode("what is it", text)
        assert set(found.type_ids) == {0, 1}
        inputs = {"input_ids": torch.tensor([found.ids]), "token_type_ids": torch.tensor([found.type_ids])}
        with torch.inference_mode():
            assert abs(ranked[index] - model(**inputs).logits.sigmoid().item()) < 1e-5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prenorm": True}, "prenorm True is not supported; supported: False"),
        ({"parallel_block": True}, "parallel_block True is not supported"),
        ({"causal": True}, "causal True is not supported"),
        ({"use_rms_norm": True}, "use_rms_norm True is not supported"),
        ({"norm_mlp": True}, "norm_mlp True is not supported"),
        ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved True is not supported"),
        ({"rotary_emb_scale_base": 512}, "rotary_emb_scale_base 512 is not supported; supported: None"),
        ({"moe_every_n_layers": 2}, "moe_every_n_layers 2 is not supported; supported: 0"),
        ({"num_experts": 8}, "num_experts 8 is not supported; supported: 0, 1"),
        ({"num_heads_kv": 1}, "num_heads_kv 1 is not supported; supported: None, 3"),
        (
            {"activation_function": "glu"},
            "activation_function 'glu' is not supported; supported: 'swiglu', 'geglu', 'g",
        ),
        ({"activation_function": "gelu_new"}, "activation_function 'gelu_new' is not supported"),
        ({"qkv_proj_bias": None}, "qkv_proj_bias None is not supported; supported: False, True"),
        ({"mlp_fc1_bias": 2}, "mlp_fc1_bias 2 is not supported; supported: False, True"),
        ({"n_embd": None}, "n_embd must be a positive int, found None"),
        ({"n_head": 5}, "n_embd 48 is not a multiple of n_head 5"),
        ({"n_head": 16}, "rotary positions rotate pairs of a head's columns, and n_embd / n_head is 3"),
        ({"n_inner": 0}, "n_inner must be a positive int, found 0"),
        ({"n_positions": -1}, "n_positions must be a positive int, found -1"),
        ({"type_vocab_size": -1}, "type_vocab_size must be a positive float, found -1"),
        ({"type_vocab_size": False}, "type_vocab_size must be a positive float, found False"),
        ({"layer_norm_epsilon": "x"}, "layer_norm_epsilon must be a positive float, found 'x'"),
        ({"pad_vocab_size_multiple": 0}, "pad_vocab_size_multiple must be a positive int, found 0"),
        ({"rotary_emb_base": 0}, "rotary_emb_base must be a positive float, found 0"),
        (
            {"rotary_emb_fraction": 1.5},
            "rotary_emb_fraction must give an even number of a head's 16 columns, found 1.5",
        ),
        (
            {"rotary_emb_fraction": 0.3},
            "rotary_emb_fraction must give an even number of a head's 16 columns, found 0.3",
        ),
        ({"rotary_emb_fraction": None}, "rotary_emb_fraction must be a positive float, found None"),
        (
            {"rotary_emb_fraction": 0.125, "rotary_scaling_factor": 2},
            "positions stretched by a text's length need heads of which more than 2 columns rotate, found 2",
        ),
        ({"rotary_scaling_factor": "2"}, "rotary_scaling_factor must be a positive float, found '2'"),
        (
            {"rotary_scaling_factor": 2, "max_trained_positions": 0},
            "max_trained_positions must be a positive int, found",
        ),
    ],
)
def test_what_is_refused_in_the_older_spelling(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **fields}))
    with pytest.raises(ModelError) as caught:
        read_config(path)
    assert str(caught.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize("missing", ["n_embd", "rotary_emb_fraction", "rotary_emb_base", "layer_norm_epsilon"])
def test_a_file_that_does_not_say(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({name: value for name, value in CONFIG.items() if name != missing}))
    with pytest.raises(ModelError) as caught:
        read_config(path)
    assert str(caught.value) == f"{path} has no {missing}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported; supported: 'gelu', 'gelu_new'"),
        ({"head_dim": 32}, "head_dim 32 is not supported; supported: None, 16"),
        (
            {"num_attention_heads": 64, "head_dim": None},
            "rotary positions rotate pairs of a head's columns, and hidden_",
        ),
        ({"rope_scaling": {"type": "ntk"}}, "rope_scaling {'type': 'ntk'} is not supported; supported: None"),
        ({"rope_parameters": 5}, "rope_parameters must be an object, found 5"),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_parameters.rope_type 'yarn' is not supported; supported: 'd",
        ),
        ({"rope_parameters": {"type": "linear"}}, "rope_parameters.type 'linear' is not supported"),
        (
            {"rope_parameters": {"beta_fast": 5}},
            "rope_parameters.beta_fast is not supported; supported: rope_theta, ro",
        ),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta must be a positive float, found 0"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, " has no rope_parameters.factor"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 0.5}},
            "rope_parameters.factor must be 1 to 1000, found",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 1e9}},
            "rope_parameters.factor must be 1 to 1000, found",
        ),
        (
            {"rope_parameters": {"rope_theta": math.inf}},
            "rope_parameters.rope_theta must be a positive float, found inf",
        ),
        (
            {"rope_parameters": {"rope_theta": math.nan}},
            "rope_parameters.rope_theta must be a positive float, found nan",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2}, "num_attention_heads": 32, "head_dim": None},
            "positions stretched by a text's length need heads of which more than 2 columns rotate, found 2",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor 0.5 is not supp"),
    ],
)
def test_what_is_refused_in_transformers_spelling(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any], message: str
) -> None:
    path = tmp_path_factory.mktemp("refused") / "config.json"
    own = transformers.NomicBertConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2).to_dict()
    path.write_text(json.dumps({**own, **fields}))
    with pytest.raises(ModelError) as caught:
        read_config(path)
    assert str(caught.value).replace(f"{path}: ", "").replace(f"{path}", "").startswith(message)


def test_missing_surplus_and_misshapen_tensors(tmp_path: Path) -> None:
    folder = build(tmp_path, "nomic_bert")
    small_tokenizer(64).save(str(folder / "tokenizer.json"))
    path, name = folder / "model.safetensors", "encoder.layers.1.mlp.fc12"
    tensors = load_file(path)
    frequencies = {
        "encoder.layers.0.attn.rotary_emb.inv_freq": torch.zeros(8)
    }  # old files have them; nothing reads them
    save_file({**tensors, **frequencies}, path, {"format": "pt"})
    engine.load_encoder(engine.load_model(str(folder)), device="cpu")
    for changed, message in (
        ({f"{name}.weight": None}, f"has no tensor {name}.weight"),
        ({f"{name}.weight": torch.zeros(96, 63)}, f"{name}.weight has shape [96, 63], config.json implies [96, 64]"),
        ({f"{name}.bias": torch.zeros(96)}, f"has a tensor {name}.bias, which config.json does not describe"),
        (
            {"encoder.layers.0.attn.Wqkv.weight": torch.zeros(128, 64)},
            "encoder.layers.0.attn.Wqkv.weight has shape [128, 64], config.json implies [192, 64]",
        ),
    ):
        kept = {each: tensor for each, tensor in {**tensors, **changed}.items() if tensor is not None}
        save_file(kept, path, {"format": "pt"})
        with pytest.raises(ModelError) as caught:
            engine.load_encoder(engine.load_model(str(folder)), device="cpu")
        assert message in str(caught.value)
