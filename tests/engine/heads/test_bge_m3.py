"""bge-m3's three outputs: one forward, its files, and the pickles that are not read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend

from embert import engine
from embert.engine.errors import BrokenModel
from embert.engine.heads.description import TokenWeights
from embert.engine.tasks import Task
from tests.engine.conftest import Floats, HuggingFace, Ids, unit
from tests.engine.heads.m3 import build_m3, heads

ALL = Task.EMBED | Task.TOKENS | Task.SPARSE | Task.MULTI


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_m3(tmp_path)


class Oracle:
    """FlagEmbedding's computation in plain torch and Python."""

    def __init__(self, folder: Path) -> None:
        self._hugging_face = HuggingFace(folder)

    def multi(self, ids: Ids) -> Floats:
        layer = heads()["colbert_linear"]
        return unit(self._hugging_face.hidden(ids) @ layer["weight"].numpy().T + layer["bias"].numpy())

    def sparse(self, ids: Ids) -> dict[int, float]:
        layer = heads()["sparse_linear"]
        weights = torch.relu(
            torch.from_numpy(self._hugging_face.hidden(ids)) @ layer["weight"][0] + layer["bias"]
        ).tolist()
        largest: dict[int, float] = {}
        for token, weight in zip(ids.tolist(), weights, strict=True):
            if token > 3 and weight > largest.get(token, 0):
                largest[token] = weight
        return dict(sorted(largest.items()))


def check_vectors(loaded: engine.Engine, folder: Path) -> None:
    texts = ["a", "def build(folder): " * 40, "", "two words"]
    oracle, encoded = Oracle(folder), loaded.tokenizer.encode(texts)
    sequences = np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])
    for ids, vector, many in zip(sequences, loaded.embed_sparse(texts), loaded.embed_multi(texts), strict=True):
        found = dict(zip(vector.indices.tolist(), vector.values.tolist(), strict=True))
        assert list(found) == sorted(found)
        assert found == pytest.approx(oracle.sparse(ids), abs=1e-4)
        assert [each.dtype for each in (vector.indices, vector.values, many)] == [np.int32, np.float32, np.float32]
        np.testing.assert_allclose(many, oracle.multi(ids)[1:], atol=2e-4)


def test_texts(folder: Path) -> None:
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        check_vectors(loaded, folder)
        queries, documents = (loaded.embed_multi(["two words"], is_query=is_query) for is_query in (True, False))
        np.testing.assert_array_equal(queries[0], documents[0])
        assert loaded.embed_sparse([]) == loaded.embed_multi([]) == []


def test_pickles_are_not_read_and_their_conversion_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tensors in heads().items():
        (folder / f"{name}.safetensors").unlink()
        torch.save(tensors, folder / f"{name}.pt")
    model = engine.load_model(str(folder))
    assert model.tasks == Task.EMBED | Task.TOKENS
    (notice,) = model.notices
    assert notice.startswith(f"sparse_linear.pt and colbert_linear.pt in {folder} are pickled and not read: dense ")
    command = notice.partition("python -c ")[2].strip('"')
    monkeypatch.chdir(folder)
    exec(command, {})
    converted = engine.load_model(str(folder))
    assert (converted.tasks, converted.notices) == (ALL, ())
    with engine.Engine.load(converted, device="cpu") as loaded:
        check_vectors(loaded, folder)


@pytest.mark.parametrize(
    ("name", "tensors", "message"),
    [
        ("sparse_linear", {"weight": torch.zeros(2, 64)}, "weight has 2 rows, expected 1$"),
        (
            "sparse_linear",
            {"weight": torch.zeros(1, 63)},
            r"weight has shape \[1, 63\], config\.json implies \[1, 64\]",
        ),
        ("colbert_linear", {"bias": torch.zeros(64)}, r"colbert_linear\.safetensors has no tensor weight$"),
        ("colbert_linear", {"weight": torch.zeros(9, 64), "bias": torch.zeros(8)}, r"bias has shape \[8\], .* \[9\]$"),
    ],
)
def test_heads_that_are_missing_or_of_another_shape(
    folder: Path, name: str, tensors: dict[str, torch.Tensor], message: str
) -> None:
    save_file(tensors, folder / f"{name}.safetensors")
    with pytest.raises(BrokenModel, match=message) as caught:
        engine.load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_special_tokens_by_other_names(folder: Path) -> None:
    names = {"cls_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>", "unk_token": "a"}
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    head = engine.load_model(str(folder)).heads.sparse
    assert isinstance(head, TokenWeights)
    assert head.special_ids == (0, 1, 2, backend.token_to_id("a"))
