"""Weight files that are truncated, have wrong headers, or hold other tensors than the model needs."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine.errors import BrokenModel
from tests.engine.conftest import BuildBert


def rewrite(path: Path, change_header: Any) -> None:
    """Rewrite a safetensors file with a changed header and the same data."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change_header(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + length :])


WORDS = "embeddings.word_embeddings.weight"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"abc", "it has 3 bytes, too few for a header"),
        (b"\xff" * 100, "its header claims 18446744073709551615 bytes, the file has 100"),
        (struct.pack("<Q", 1000) + b"{}", "its header claims 1000 bytes, the file has 10"),
        (struct.pack("<Q", 4) + b"{abc", "its header is not JSON: "),
        (struct.pack("<Q", 2) + b"[]", "its header is not a JSON object"),
    ],
)
def test_garbage_for_weights(build_bert: BuildBert, content: bytes, reason: str) -> None:
    folder = build_bert()
    path = folder / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(BrokenModel) as caught:
        engine.load_encoder(engine.load_model(str(folder)), device="cpu")
    assert str(caught.value).startswith(f"{path} is not a valid safetensors file: {reason}")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"dtype": "F8"}, f"{WORDS} has the dtype F8, which is not known here"),
        ({"shape": [64, -64]}, f"its header has no valid entry for {WORDS}"),
        ({"shape": None}, f"its header has no valid entry for {WORDS}"),
        ({"shape": [64, 65]}, f"{WORDS} has 16384 bytes, which its shape [64, 65] and dtype F32 contradict"),
        ({"data_offsets": [0]}, f"its header has no valid entry for {WORDS}"),
    ],
)
def test_headers_that_lie(build_bert: BuildBert, entry: dict[str, Any], reason: str) -> None:
    folder = build_bert()
    rewrite(folder / "model.safetensors", lambda header: header[WORDS].update(entry))
    with pytest.raises(BrokenModel) as caught:
        engine.load_encoder(engine.load_model(str(folder)), device="cpu")
    assert str(caught.value).endswith(f"model.safetensors is not a valid safetensors file: {reason}")


def test_a_truncated_file(build_bert: BuildBert) -> None:
    folder = build_bert()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(
        BrokenModel, match=r"model\.safetensors is not a .*: \S+ ends at byte \d+ of \d+: the file is trunc"
    ):
        engine.load_encoder(engine.load_model(str(folder)), device="cpu")


def test_tensors_that_are_missing_or_of_another_shape_or_dtype(build_bert: BuildBert) -> None:
    folder = build_bert()
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "encoder.layer.1.output.dense.bias"
    for replaced, message in (
        ({}, rf"model\.safetensors has no tensor {name}$"),
        ({name: torch.zeros(65)}, rf"model\.safetensors: {name} has shape \[65\], config\.json implies \[64\]$"),
        ({name: torch.zeros(64, dtype=torch.int64)}, rf"{name} has dtype I64, expected one of F64, F32, F16, BF16$"),
    ):
        save_file({**{n: t for n, t in tensors.items() if n != name}, **replaced}, path)
        with pytest.raises(BrokenModel, match=message):
            engine.load_encoder(engine.load_model(str(folder)), device="cpu")


def test_broken_shards(build_bert: BuildBert) -> None:
    folder = build_bert(shard_size="100KB")
    model = engine.load_model(str(folder))
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shard = index["weight_map"][WORDS]
    for weight_map, message in (
        (None, r"index\.json has no weight_map"),
        ({**index["weight_map"], "x": shard}, rf"{shard} has no tensor x, which model\.safetensors\.index\.json says"),
        ({WORDS: "../x.safetensors"}, r"names the file \.\./x\.safetensors, which is not in its folder"),
        ({WORDS: "gone.safetensors"}, r"gone\.safetensors cannot be read: No such file"),
        ({WORDS: shard}, r"index\.json has no tensor embeddings\.position_embeddings\.weight"),
    ):
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(BrokenModel, match=message):
            engine.load_encoder(model, device="cpu")
