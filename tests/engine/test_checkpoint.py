"""Weight files that are truncated, have wrong headers, or hold other tensors than the model needs."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine.errors import BrokenModel
from tests.engine.conftest import BuildBert

WORDS = "embeddings.word_embeddings.weight"


def load(folder: Path) -> None:
    engine.load_encoder(engine.load_model(str(folder)), device="cpu")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"abc", "3 bytes"),
        (b"\xff" * 100, "18446744073709551615 bytes, the file has 100"),
        (struct.pack("<Q", 1000) + b"{}", "1000 bytes, the file has 10"),
        (struct.pack("<Q", 4) + b"{abc", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        ({"dtype": "F8"}, f"{WORDS} has the dtype F8"),
        ({"shape": [64, -64]}, WORDS),
        ({"shape": None}, WORDS),
        ({"shape": [64, 65]}, f"{WORDS} has 16384 bytes, which its shape [64, 65]"),
        ({"data_offsets": [0]}, WORDS),
        (-1000, "is truncated"),
    ],
    ids=str,
)
def test_broken_safetensors_file(build_bert: BuildBert, content: bytes | dict[str, Any] | int, reason: str) -> None:
    """What is in the file, what its header says of a tensor, or how much is cut off its end."""
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
    with pytest.raises(BrokenModel) as caught:
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
        ({WORDS: "gone.safetensors"}, "gone.safetensors cannot be read"),
        ({WORDS: shard}, "has no tensor embeddings.position_embeddings.weight"),
    ):
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(BrokenModel, match=re.escape(message)):
            engine.load_encoder(model, device="cpu")
