"""ModernBERT: both spellings of its config.json, windows at their borders, and its heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from embert import engine
from embert.engine.batch import pack
from embert.engine.encoders.cuda.shapes import check_heads
from embert.engine.errors import EncoderError, UnsupportedModel
from embert.engine.models import read_config
from embert.engine.models.encoder_config import Attention, EncoderConfig, Rotary
from embert.engine.tasks import Task
from tests.engine.conftest import Install, random_sequences, without_own_kernels
from tests.engine.heads.classifiers import build_classifier, hugging_face_logits
from tests.engine.heads.test_sparse import dense, sparse
from tests.oracles.exact import cosines, hidden_states, near
from tests.oracles.model_cases import build, byte_level

LAYERS = 4


def written(path: Path, drop: tuple[str, ...] = (), **fields: Any) -> EncoderConfig:
    """Change a config.json, and read it."""
    content = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in content.items() if name not in drop}))
    return read_config(path)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config.json as transformers 5 writes it, of layers that see all, few, few, all."""
    return build(tmp_path, "modernbert", num_hidden_layers=LAYERS) / "config.json"


OLD = ("rope_parameters", "layer_types")  # what transformers 4 does not write


@pytest.mark.parametrize(
    ("fields", "thetas", "every"),
    [
        ({"global_rope_theta": 80_000, "local_rope_theta": 5_000, "global_attn_every_n_layers": 2}, (8e4, 5e3), 2),
        ({"global_attn_every_n_layers": 1, "local_attention": 32}, None, 1),
    ],
)
def test_both_spellings(
    tmp_path: Path, config: Path, fields: dict[str, Any], thetas: tuple[float, float] | None, every: int
) -> None:
    """The one of the hub's files, as transformers reads it too, and the one that transformers 5 makes of it."""
    old = written(config, OLD, **fields, position_embedding_type="absolute", layer_norm_eps=1e-05)
    theta, local = thetas or (160_000.0, 10_000.0)
    window = fields.get("local_attention", 16) // 2
    assert old.attention == tuple(
        Attention(Rotary(local, 16), window) if layer % every else Attention(Rotary(theta, 16))
        for layer in range(LAYERS)
    )
    theirs: Any = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert set(OLD) <= set(again)
    assert read_config(tmp_path / "again" / "config.json") == old


def test_local_theta_defaults_to_the_global_one(config: Path) -> None:
    """Follows transformers 4; transformers 5 does not run such a file."""
    read = written(config, OLD, local_rope_theta=None, global_rope_theta=80_000.0)
    assert read.attention[1] == Attention(Rotary(80_000, 16), 8)


# Around the window's own end, the block of queries of the CPU encoder, and twice both of them.
@pytest.mark.parametrize(
    ("local", "lengths"), [(1, [1, 2, 130]), (15, [7, 8, 9, 16, 141, 143]), (128, [64, 66, 255, 258, 330])]
)
def test_windows_at_their_borders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: int, lengths: list[int]
) -> None:
    """Our own kernels, where this CPU runs them, and torch's."""
    folder = build(tmp_path, "modernbert", num_hidden_layers=3, local_attention=local, max_position_embeddings=512)
    sequences = random_sequences(lengths, 60)
    expected = hidden_states(folder, sequences)
    assert near(folder, sequences, expected) >= 0.999999
    without_own_kernels(monkeypatch)
    assert near(folder, sequences, expected) >= 0.999999
    # A window that is one token off is seen.
    other = hidden_states(folder, sequences[-1:], local_attention=local + 2)
    assert cosines(other[0], expected[-1]).min() < 0.999


def test_masked_lm_without_biases(tmp_path: Path) -> None:
    folder = build(tmp_path, "modernbert", head="ForMaskedLM", modules=False, decoder_bias=False)
    byte_level(300).save(str(folder / "tokenizer.json"))
    theirs: Any = transformers.AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float64).eval()
    assert not [name for name in load_file(folder / "model.safetensors") if name.endswith("bias")]
    sequences = random_sequences([9, 40], 60)
    encoder = engine.load_encoder(engine.load_model(str(folder), pooling="splade"), device="cpu")
    rows = sparse(encoder, sequences)
    for number, ids in enumerate(sequences):
        with torch.inference_mode():
            logits = theirs(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].amax(0).relu()
        np.testing.assert_allclose(dense(rows, number, 64), logits.log1p().numpy(), atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_classification_head_on_the_host_after_a_gpu(tmp_path: Path, pooling: str, install: Install) -> None:
    """The extension pools as the head asks; the logits are those of transformers, and of the CPU encoder."""
    folder = build_classifier(tmp_path, "modernbert", classifier_pooling=pooling)
    model = engine.load_model(str(folder))
    gpu = install(model)
    encoder = engine.load_encoder(model)
    assert encoder.device == "cuda:0"
    assert (gpu.encoders[0].config.pooling, gpu.encoders[0].heads.classifier) == (pooling, [])
    sequences = [np.arange(2, 2 + length, dtype=np.int32) for length in (5, 1, 17, 9)]
    found = encoder.encode(pack(sequences), Task.CLASSIFY)
    np.testing.assert_allclose(found, hugging_face_logits(folder, sequences), rtol=1e-4, atol=1e-5)
    for row, ids in enumerate(sequences):
        assert encoder.encode(pack([ids]), Task.CLASSIFY).tobytes() == found[row].tobytes()
    *_, normalize, tasks = gpu.encoders[0].batches[-1]
    assert not normalize.any()
    assert set(tasks.tolist()) == {Task.EMBED}
    with pytest.raises(EncoderError, match="the batch wants"):
        encoder.submit(pack(sequences))  # vectors, which this model does not have


def test_gpu_refuses_to_pool_for_vectors_and_for_a_host_head(tmp_path: Path) -> None:
    model = engine.load_model(str(build_classifier(tmp_path, "modernbert")), pooling="mean")
    with pytest.raises(UnsupportedModel) as caught:
        check_heads(model)
    assert str(caught.value) == (
        f"{tmp_path} embeds and has a classification head that is computed on the host, from pooled rows; the CUDA "
        "encoder does not run both"
    )
