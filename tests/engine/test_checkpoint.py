"""Weight files that are truncated, have wrong headers, or hold other tensors than the model needs."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine.errors import BrokenModel, ModelError
from embert.engine.models.encoder_config import tensor_shapes
from embert.engine.weights.checkpoint import Checkpoint, on_bytes_read
from tests.engine.conftest import BuildBert, small_tokenizer

WORDS = "embeddings.word_embeddings.weight"


def load(folder: Path) -> None:
    engine.load_encoder(engine.load_model(str(folder)), device="cpu")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"abc", "3 bytes"),
        (b"\xff" * 100, "18446744073709551615 bytes; the limit is 10000000"),
        (struct.pack("<Q", 1000) + b"{}", "1000 bytes, the file has 10"),
        (struct.pack("<Q", 4) + b"{abc", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        ({"dtype": "F8_E4M3"}, f"{WORDS} is stored as F8_E4M3, which is not supported"),
        ({"shape": [1] * 9 + [64, 64]}, WORDS),
        ({"shape": [64, -64]}, WORDS),
        ({"shape": None}, WORDS),
        ({"shape": [64, 65]}, f"{WORDS} has 16384 bytes, which its shape [64, 65]"),
        ({"data_offsets": [0]}, WORDS),
        (-1000, "is truncated"),
    ],
    ids=str,
)
def test_broken_safetensors_file(build_bert: BuildBert, content: bytes | dict[str, Any] | int, reason: str) -> None:
    """The file's content, a tensor's entry in its header, or its end is wrong."""
    folder = build_bert()
    path = folder / "model.safetensors"
    stored = path.read_bytes()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, int):
        path.write_bytes(stored[:content])
    else:
        length = int.from_bytes(stored[:8], "little")
        header = json.loads(stored[8 : 8 + length])
        header[WORDS].update(content)
        encoded = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + stored[8 + length :])
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert str(caught.value).startswith(str(path))
    assert reason in str(caught.value)


def test_tensors_that_are_missing_or_of_another_shape_or_dtype(build_bert: BuildBert) -> None:
    folder = build_bert()
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "encoder.layer.1.output.dense.bias"
    for replaced, message in (
        ({}, f"has no tensor {name}"),
        ({name: torch.zeros(65)}, f"{name} has shape [65], config.json implies [64]"),
        ({name: torch.zeros(64, dtype=torch.int64)}, f"{name} has dtype I64"),
    ):
        save_file({**{n: t for n, t in tensors.items() if n != name}, **replaced}, path)
        with pytest.raises(BrokenModel, match=re.escape(message)):
            load(folder)


def test_broken_shards(build_bert: BuildBert) -> None:
    folder = build_bert(shard_size="100KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = index["weight_map"][WORDS]
    model = engine.load_model(str(folder))
    for weight_map, message in (
        (None, "has no weight_map"),
        ({**index["weight_map"], "x": shard}, f"{shard} has no tensor x"),
        ({WORDS: "../x.safetensors"}, "../x.safetensors"),
        ({WORDS: "/etc/x.safetensors"}, "/etc/x.safetensors"),
        ({WORDS: "below/x.safetensors"}, "below/x.safetensors"),
        ({WORDS: "gone.safetensors"}, "gone.safetensors cannot be read"),
        ({WORDS: shard}, "has no tensor embeddings.position_embeddings.weight"),
    ):
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(BrokenModel, match=re.escape(message)):
            engine.load_encoder(model, device="cpu")


def mapped_bytes(folder: Path) -> int:
    """Bytes of the files in a folder that this process has in memory."""
    resident, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            resident += 1024 * int(line.split()[1])
    return resident


def test_shards_pass_through_memory_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor counts once for the progress, and the pages that were read do not stay."""
    library: Any = transformers
    config = library.Qwen3Config(
        vocab_size=4000, hidden_size=256, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=1024, head_dim=64,
    )  # fmt: skip
    library.Qwen3Model(config).save_pretrained(tmp_path, max_shard_size="6MB")
    small_tokenizer(64).save(str(tmp_path / "tokenizer.json"))
    shards = list(tmp_path.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in shards)
    assert len(shards) > 3
    assert size > 20e6
    monkeypatch.setattr("embert.engine.weights.checkpoint._Reading.HELD_BYTES", 1 << 20)
    model = engine.load_model(str(tmp_path), pooling="last-token")
    reports: list[tuple[int, int]] = []
    reporting = on_bytes_read.set(lambda read, whole: reports.append((read, whole)))
    try:
        checkpoint = Checkpoint.open(model)
    finally:
        on_bytes_read.reset(reporting)
    most = 0
    for _ in range(2):  # as a check of the weights and their upload
        for name in tensor_shapes(model.config):
            assert np.isfinite(checkpoint.stored(name).array.sum())
            if name.endswith("output.dense.weight"):
                most = max(most, mapped_bytes(tmp_path))
    assert most < 12e6  # the word table has 4 MB, and a layer 4
    whole = reports[-1][1]
    assert reports[-1] == (whole, whole)
    assert abs(whole - size) < 1e5
    assert [read for read, _ in reports] == sorted({read for read, _ in reports})
