"""Every model type compared with HuggingFace: names of tensors and fields, positions, tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine.encoders.positions import buckets
from embert.engine.encoders.self_test import self_test_ids, vector_of
from embert.engine.errors import BrokenModel
from embert.engine.models import MODEL_TYPES, read_config
from embert.engine.tasks import Task
from embert.engine.weights.checkpoint import Checkpoint
from tests.engine.conftest import (
    HuggingFace,
    ModelFolder,
    random_sequences,
    small_tokenizer,
    unit,
    without_own_kernels,
)
from tests.oracles.exact import hidden_states, near
from tests.oracles.model_cases import MODEL_CASES, SHORT_CASES, build, byte_level, hugging_face
from tests.server.models import edit_json

# Padding tokens (p) first, in the middle, last, several, nothing else, and none.
PADDED = ["p", "pt", "tp", "tptt", "ttpp", "pptt", "ptptp", "pppp", "t", "tttp" * 30, "p" * 128]


def test_every_model_type_has_a_case() -> None:
    # transformers has no class for "new", and "mistral3" has a part for images: see test_gte.py and test_decoders.py.
    assert {name.partition(",")[0] for name in MODEL_CASES} | {"new", "mistral3"} == set(MODEL_TYPES)


def with_padding_inside(padding: int) -> list[npt.NDArray[np.int32]]:
    random = np.random.default_rng(0)
    return [
        np.array([padding if each == "p" else random.integers(10, 60) for each in pattern], np.int32)
        for pattern in PADDED
    ]


@pytest.mark.parametrize("case", SHORT_CASES)
def test_hidden_states_and_pooled_vectors(model_folder: ModelFolder, case: str) -> None:
    """Compares mixed lengths, the self test's vector, and padding tokens inside texts, which move positions."""
    folder = model_folder(case)
    model = engine.load_model(str(folder))
    assert (model.config.model_type, model.config.max_positions) == (case.partition(",")[0], 128)
    padding = json.loads((folder / "config.json").read_text()).get("pad_token_id") or 1
    has_padding_position = model.config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet")
    assert model.config.padding_id == (padding if has_padding_position else None)
    sequences = [ids % 50 + 10 for ids in random_sequences([1, 2, 15, 16, 17, 64, 65, 127, 128], 64)]  # no padding
    sequences += with_padding_inside(padding)
    encoder, reference = engine.load_encoder(model, device="cpu"), HuggingFace(folder)
    expected = [reference.hidden(ids) for ids in sequences]
    hidden = encoder.encode(engine.pack(sequences), Task.TOKENS)
    np.testing.assert_allclose(hidden, np.concatenate(expected), atol=2e-4)
    for ids, rows in zip(sequences, expected, strict=True):
        np.testing.assert_allclose(encoder.encode(engine.pack([ids]))[0], unit(rows.mean(0)), atol=1e-5)
    ids = self_test_ids(model.config)
    assert model.config.padding_id not in ids
    windows = [each.window for each in model.config.attention if each.window]
    assert len(ids) == (max(windows) + 16 if windows else 5)
    for pooling in ("cls", "mean", "max", "last-token"):
        vector = vector_of(ids, model.config, Checkpoint.open(model), pooling)
        np.testing.assert_allclose(vector, reference.pooled(ids, pooling), rtol=1e-4, atol=1e-5)


STRETCHED = {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1000.0}}
BLOCKS = [1, 2, 3, 31, 64, 64, 127, 128, 129, 255, 256, 257, 512]
# A case → positions, more of its config, the limit that follows, lengths (several of one, and past windows and blocks
# of queries), and the least cosine in bfloat16. transformers' own is 0.9926, and EuroBERT's 0.969.
LONG: dict[str, tuple[int, dict[str, Any], int, list[int], float]] = {
    "xlm-roberta, long": (8194, {}, 8192, [1100, 30, 513], 0.99),
    "mpnet, long": (514, {}, 512, [512, 3, 512, 129, 40, 40, 40], 0.99),
    "gte": (8192, {}, 8192, [20, 600, 1100], 0.99),
    "modernbert": (8192, {"local_attention": 128}, 8192, [1100, 30], 0.99),
    "nomic_bert": (512, STRETCHED, 2048, [20, 300, 700], 0.99),
    "eurobert": (8192, {}, 8192, [1100, 30, 513], 0.975),
    **{
        case: (2048, {}, 2048, [1100, 1, 2, 16, 513], 0.0)
        for case in ("qwen3", "qwen2, windows", "mistral", "llama, llama3", "gemma3_text", "ultrabert",
                     "ministral3, scaled queries")
    },
    **{
        case: (512, {} if case.endswith((", c2p", ", plain")) else {"position_buckets": 256}, 512, BLOCKS, 0.99)
        for case in SHORT_CASES if case.startswith("deberta")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", LONG)
def test_long_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Our own kernels, where this CPU runs them, and torch's."""
    positions, config, limit, lengths, least = LONG[case]
    folder = build(tmp_path, case, max_position_embeddings=positions, **config)
    assert read_config(folder / "config.json").max_positions == limit
    sequences = [ids % 50 + 10 for ids in random_sequences(lengths, 64)]
    expected = hidden_states(folder, sequences)
    assert near(folder, sequences, expected) >= 0.999999
    without_own_kernels(monkeypatch)
    assert near(folder, sequences, expected) >= 0.999999
    if least:
        assert near(folder, sequences, expected, dtype="bfloat16") >= least


@pytest.mark.usefixtures("products")
def test_centered_convolutions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LFM2.5's own class, which its checkpoints name, is transformers' with other directions."""
    folder = build(tmp_path, "lfm2", is_causal=False)
    edit_json(folder / "config.json", is_causal=True, architectures=["Lfm2BidirectionalModel"])
    edit_json(folder / "config.json", auto_map={"AutoModel": "modeling_lfm2.Lfm2BidirectionalModel"})
    sequences = random_sequences([1, 2, 3, 30, 30, 70], 60)

    def centered(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **_: Any) -> torch.Tensor:
        return torch.nn.functional.conv1d(x, weight[:, None], bias, padding=1, groups=len(weight))

    monkeypatch.setattr("transformers.models.lfm2.modeling_lfm2.causal_conv1d_fn", centered)
    read = json.loads((folder / "config.json").read_text())
    causal = hugging_face("Lfm2Config")(**{**read, "is_causal": False})
    expected = hidden_states(folder, sequences, config=causal)
    assert near(folder, sequences, expected) >= 0.999999
    assert near(folder, sequences, expected, dtype="bfloat16") >= 0.99


def test_buckets_of_distances_equal_hugging_face() -> None:
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    distances = np.arange(-9000, 9001)
    reference: Any = MPNetEncoder
    expected = reference.relative_position_bucket(torch.from_numpy(distances))
    np.testing.assert_array_equal(buckets(distances, 32), expected.numpy())


@pytest.mark.parametrize(
    ("layers", "groups", "inner", "numbers"),
    [(3, 1, 1, (0, 0, 0)), (5, 2, 2, (0, 1, 0, 1, 0, 1, 2, 3, 2, 3)), (4, 3, 1, (0, 0, 1, 2))],
)
def test_layers_that_share_weights(
    tmp_path: Path, layers: int, groups: int, inner: int, numbers: tuple[int, ...]
) -> None:
    shape: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_hidden_groups": groups,
        "inner_group_num": inner,
        "hidden_act": "relu",
    }
    folder = build(tmp_path, "albert", **shape)
    read = read_config(folder / "config.json")
    assert (read.layers, read.shared_layers, read.activation) == (len(numbers), numbers, "relu")
    sequences = random_sequences([1, 30, 70], 60)
    assert near(folder, sequences, hidden_states(folder, sequences)) >= 0.999999


# A head → the pooling that asks for it, and the task that reads it.
READS = {
    "Model": (None, Task.TOKENS),
    "ForMaskedLM": ("splade", Task.SPARSE),
    "ForSequenceClassification": (None, Task.CLASSIFY),
}


def has_the_same_outputs(folder: Path, head: str, change: Callable[[], object]) -> None:
    """Asserts that a model with this head has the same bits before and after `change` of its files."""
    pooling, task = READS[head]
    batch, outputs = engine.pack(random_sequences([3, 40], 60)).with_tasks(task), []
    for _ in range(2):
        encoder = engine.load_encoder(engine.load_model(str(folder), pooling=pooling), device="cpu")
        outputs.append(encoder.wait(encoder.submit(batch))[task])
        change()
    assert outputs[0].values.size
    np.testing.assert_array_equal(outputs[0].values, outputs[1].values)
    np.testing.assert_array_equal(outputs[0].indices, outputs[1].indices)


@pytest.mark.parametrize("head", READS)
@pytest.mark.parametrize("case", ["gte", "nomic_bert"])
def test_tensor_names_of_transformers_classes(tmp_path: Path, case: str, head: str) -> None:
    """transformers writes these under the names of the models' own code; its classes' names give the same bits."""
    folder = build(tmp_path, case, head=head, modules=False, tokenizer=small_tokenizer(64))
    reference: Any = getattr(transformers, MODEL_CASES[case][0] + head).from_pretrained(folder)
    own = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    path = folder / "model.safetensors"
    assert not {name for name in load_file(path) if ".0." in name} & set(own)  # of the first layer, none is the same
    has_the_same_outputs(folder, head, lambda: save_file(own, path, {"format": "pt"}))


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("roberta", {"max_position_embeddings": 514}, "has shape [130, 64], config.json implies [514"),
        ("mpnet", {"num_attention_heads": 8}, "relative_attention_bias.weight has shape [32, 4]"),
        ("distilbert", {"n_layers": 3}, "has no tensor transformer.layer.2.attention.q_lin.weight"),
        ("electra", {"embedding_size": 64}, "embeddings.word_embeddings.weight has shape [64, 24]"),
        ("electra, as wide", {"embedding_size": 32}, "word_embeddings.weight has shape [64, 64]"),
        ("albert", {"num_hidden_groups": 2}, "no tensor encoder.albert_layer_groups.1.albert_layers.0.attention.query"),
        ("albert, groups", {"inner_group_num": 1}, "has a tensor encoder.albert_layer_groups.0.albert_layers.1."),
        ("albert, groups", {"num_hidden_groups": 1}, "has a tensor encoder.albert_layer_groups.1.albert_layers.0."),
        ("modernbert, biases", {"mlp_bias": False}, "has a tensor layers.0.mlp.W"),
    ],
)
def test_weights_that_contradict_the_config(tmp_path: Path, case: str, fields: dict[str, Any], message: str) -> None:
    folder = build(tmp_path, case, tokenizer=byte_level(300))
    edit_json(folder / "config.json", **fields)
    with pytest.raises(BrokenModel) as caught:
        engine.load_encoder(engine.load_model(str(folder)), device="cpu")
    assert message in str(caught.value)
