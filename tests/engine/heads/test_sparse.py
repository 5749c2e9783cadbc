"""Sparse vectors compared with HuggingFace and sentence-transformers: SPLADE and bge-m3's token weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine.batch import TaskOutput
from embert.engine.encoders.base import Encoder
from embert.engine.errors import BrokenModel, UnsupportedModel
from embert.engine.heads.token_rows import token_weight_rows
from embert.engine.tasks import Task
from tests.engine.conftest import Floats, Ids, random_sequences, small_tokenizer
from tests.engine.heads.late_interaction import save_tokenizer
from tests.oracles.model_cases import MASKED_LM_CASES, build, byte_level, list_modules, write_modules
from tests.server.models import edit_json

LENGTHS = [1, 2, 3, 7, 8, 17, 17, 31, 32, 33, 64, 65, 127, 128]


class MaskedLM:
    """A checkpoint with random weights, whose decoder's bias leaves a share of the values above 0, and HuggingFace."""

    def __init__(self, folder: Path, case: str, *, vocab_size: int, share: float, **config: Any) -> None:
        build(folder, case, vocab_size=vocab_size, head="ForMaskedLM", modules=False, **config)
        self._model: Any = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
        self.folder, self.sequences = folder, random_sequences(LENGTHS, vocab_size - 10)
        self.sequences = [ids + 10 for ids in self.sequences]  # no padding
        peaks = np.stack([self.logits(ids).max(0) for ids in self.sequences])
        least = peaks.max() + 1 if share == 0 else np.quantile(peaks, 1 - share)
        self._model.get_output_embeddings().bias.data -= float(least)
        self._model.save_pretrained(folder)
        (small_tokenizer(vocab_size) if vocab_size < 300 else byte_level(300)).save(str(folder / "tokenizer.json"))

    def logits(self, ids: Ids) -> Floats:
        """int32 [L] → float32 [L, vocabulary]."""
        with torch.inference_mode():
            rows: Floats = self._model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
        return rows

    def weights(self, ids: Ids) -> Floats:
        """The sparse vector with its zeros: float32 [vocabulary]."""
        weights: Floats = np.log1p(np.maximum(self.logits(ids), 0)).max(0)
        return weights


def dense(rows: TaskOutput, sequence: int, columns: int) -> Floats:
    """One sequence's pairs as a vector with zeros."""
    assert rows.indices is not None
    one = rows.slice(sequence, sequence + 1)
    assert one.indices is not None
    assert (np.diff(one.indices) > 0).all()
    assert one.values.shape == (len(one.indices), 1)
    assert (one.values > 0).all()
    vector = np.zeros(columns, np.float32)
    vector[one.indices] = one.values[:, 0]
    return vector


def same(ours: Floats, theirs: Floats) -> None:
    """The same indices wherever a value is above 1e-3, and one direction."""
    assert ((theirs <= 1e-3) | (ours > 0)).all()
    assert ((ours <= 1e-3) | (theirs > 0)).all()
    if theirs.any():
        cosine = (ours.astype(np.float64) @ theirs) / np.linalg.norm(ours) / np.linalg.norm(theirs)
        assert cosine >= 0.99999
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


def sparse(encoder: Encoder, sequences: list[Ids]) -> TaskOutput:
    return encoder.wait(encoder.submit(engine.pack(sequences).with_tasks(Task.SPARSE)))[Task.SPARSE]


@pytest.mark.parametrize("case", MASKED_LM_CASES)
def test_splade_of_every_model_type_equals_hugging_face(tmp_path: Path, case: str) -> None:
    reference = MaskedLM(tmp_path, case, vocab_size=77, share=0.05)
    model = engine.load_model(str(tmp_path), pooling="splade")
    assert (model.tasks, model.notices) == (Task.SPARSE, ())
    encoder = engine.load_encoder(model, device="cpu")
    rows = sparse(encoder, reference.sequences)
    for number, ids in enumerate(reference.sequences):
        same(dense(rows, number, 77), reference.weights(ids))
        alone = sparse(encoder, [ids])
        np.testing.assert_allclose(dense(alone, 0, 77), dense(rows, number, 77), atol=1e-5)
    assert 0.02 < len(rows.values) / (77 * len(LENGTHS)) < 0.1


@pytest.mark.parametrize(
    ("case", "metadata"),
    [("bert", True), ("bert", False), ("roberta", False), ("modernbert", True), ("electra", False), ("mpnet", True)],
)
def test_word_table_under_the_decoders_name(tmp_path: Path, case: str, metadata: bool) -> None:
    reference = MaskedLM(tmp_path, case, vocab_size=77, share=0.05)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    (word,) = (name for name in tensors if "word_embeddings" in name or "tok_embeddings" in name)
    names = engine.load_model(str(tmp_path)).config.tensors.masked_lm
    assert names is not None
    tensors[decoder := f"{names.decoder}.weight"] = tensors.pop(word)
    # As safetensors.torch.save_model writes it; transformers ties without the metadata too.
    save_file(tensors, path, {"format": "pt", **({word: decoder} if metadata else {})})
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.get_input_embeddings().weight.data, tensors[decoder])
    model = engine.load_model(str(tmp_path), pooling="splade")
    rows = sparse(engine.load_encoder(model, device="cpu"), reference.sequences)
    for number, ids in enumerate(reference.sequences):
        same(dense(rows, number, 77), reference.weights(ids))
    if not metadata:
        edit_json(tmp_path / "config.json", tie_word_embeddings=False)
        with pytest.raises(BrokenModel, match=rf"model\.safetensors has no tensor .*{word.rpartition('.')[0][-10:]}"):
            engine.load_encoder(engine.load_model(str(tmp_path)), device="cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vocabulary_of_30522(tmp_path: Path, dtype: str) -> None:
    # A separate decoder: nothing but its bias is learned with the head where it is tied to the word table.
    reference = MaskedLM(
        tmp_path, "bert", vocab_size=30_522, share=0.01, hidden_size=32, tie_word_embeddings=dtype == "bfloat16"
    )
    encoder = engine.load_encoder(engine.load_model(str(tmp_path), pooling="splade"), device="cpu", dtype=dtype)
    rows = sparse(encoder, reference.sequences)
    for number, ids in enumerate(reference.sequences):
        ours, theirs = dense(rows, number, 30_522), reference.weights(ids)
        if dtype == "float32":
            same(ours, theirs)
        else:
            assert ours @ theirs >= 0.99 * np.linalg.norm(ours) * np.linalg.norm(theirs)


def test_texts_without_any_weight(tmp_path: Path) -> None:
    reference = MaskedLM(tmp_path, "distilbert", vocab_size=77, share=0)
    encoder = engine.load_encoder(engine.load_model(str(tmp_path), pooling="splade"), device="cpu")
    rows = sparse(encoder, reference.sequences)
    assert rows.values.shape == (0, 1)
    assert rows.counts.tolist() == [0] * len(LENGTHS)
    assert rows.indices is not None
    assert rows.indices.shape == (0,)


def pooling_module(folder: Path, **fields: Any) -> None:
    """sentence-transformers 5's files of a SPLADE model."""
    module = "sentence_transformers.sparse_encoder.models."
    list_modules(folder, (f"{module}MLMTransformer", ""), (f"{module}SpladePooling", "1_SpladePooling"))
    (folder / "1_SpladePooling").mkdir(exist_ok=True)
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps({"pooling_strategy": "max", **fields}))


def test_pooling_module_whose_logarithm_is_taken_twice(tmp_path: Path) -> None:
    reference = MaskedLM(tmp_path, "bert", vocab_size=77, share=0.3)
    pooling_module(tmp_path, activation_function="log1p_relu")
    model = engine.load_model(str(tmp_path))
    assert model.tasks == Task.SPARSE
    rows = sparse(engine.load_encoder(model, device="cpu"), reference.sequences)
    for number, ids in enumerate(reference.sequences):
        same(dense(rows, number, 77), np.log1p(reference.weights(ids)))
    assert engine.load_model(str(tmp_path), pooling="cls").tasks == Task.EMBED | Task.TOKENS


def test_masked_language_model_with_a_pooling_module_or_none_embeds(tmp_path: Path) -> None:
    MaskedLM(tmp_path, "bert", vocab_size=77, share=0.3)
    assert engine.load_model(str(tmp_path)).tasks == Task.EMBED | Task.TOKENS
    write_modules(tmp_path, dense=[(64, 32, "torch.nn.modules.activation.Tanh")])
    assert engine.load_model(str(tmp_path)).tasks == Task.EMBED | Task.TOKENS
    assert engine.load_model(str(tmp_path), pooling="splade").tasks == Task.SPARSE


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pooling_strategy": "sum"}, "pooling_strategy 'sum' is not supported; supported: 'max'"),
        ({"activation_function": "gelu"}, "activation_function 'gelu' is not supported; supported: 'relu', 'log1p_"),
    ],
)
def test_poolings_that_cannot_be_served(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    MaskedLM(tmp_path, "bert", vocab_size=77, share=0.3)
    pooling_module(tmp_path, **fields)
    with pytest.raises(UnsupportedModel, match=rf"1_SpladePooling/config\.json: {message}"):
        engine.load_model(str(tmp_path))


def test_heads_that_are_missing_or_of_another_shape(tmp_path: Path) -> None:
    MaskedLM(tmp_path, "roberta", vocab_size=77, share=0.3)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name, replaced, message in (
        ("lm_head.dense.bias", None, r"model\.safetensors has no tensor lm_head\.dense\.bias$"),
        ("lm_head.layer_norm.weight", None, r"has no tensor lm_head\.layer_norm\.weight$"),
        ("lm_head.bias", None, r"has no tensor lm_head\.bias$"),
        ("lm_head.bias", torch.zeros(78), r"lm_head\.bias has shape \[78\], config\.json implies \[77\]$"),
        ("lm_head.decoder.weight", torch.zeros(77, 65), r"has shape \[77, 65\], config\.json implies \[77, 64\]$"),
    ):
        kept = {n: t for n, t in tensors.items() if n != name}
        save_file(kept if replaced is None else {**kept, name: replaced}, path)
        with pytest.raises(BrokenModel, match=message) as caught:
            engine.load_model(str(tmp_path), pooling="splade")
        assert "\n" not in str(caught.value)
    edit_json(tmp_path / "config.json", architectures=["RobertaModel"])
    with pytest.raises(UnsupportedModel, match="needs a checkpoint of an architecture …ForMaskedLM, found Rob"):
        engine.load_model(str(tmp_path), pooling="splade")


def test_names_of_tensorflow_in_a_head(tmp_path: Path) -> None:
    reference = MaskedLM(tmp_path, "bert", vocab_size=77, share=0.3)
    path = tmp_path / "model.safetensors"
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(renamed, path)
    encoder = engine.load_encoder(engine.load_model(str(tmp_path), pooling="splade"), device="cpu")
    same(dense(sparse(encoder, reference.sequences[:1]), 0, 77), reference.weights(reference.sequences[0]))


def test_sentence_transformers(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not of every environment")
    MaskedLM(tmp_path, "bert", vocab_size=77, share=0.3)
    save_tokenizer(tmp_path)
    theirs = library.SparseEncoder(str(tmp_path), device="cpu")
    theirs.save_pretrained(str(tmp_path / "saved"))
    texts = ["a", "ab cd ef", "the quick brown fox " * 9, "", "?"]
    expected = theirs.encode(texts, convert_to_sparse_tensor=False).numpy()
    for folder, pooling in ((tmp_path, "splade"), (tmp_path / "saved", None)):
        with engine.Engine.load(str(folder), device="cpu", pooling=pooling) as loaded:
            found = loaded.embed_sparse(texts)
        for vector, row in zip(found, expected, strict=True):
            whole = np.zeros(77, np.float32)
            whole[vector.indices] = vector.values
            same(whole, row)


def test_weight_that_is_not_a_number_is_seen() -> None:
    rows = token_weight_rows(np.array([7, 7, 8]), np.array([0, 3]), np.array([1, np.nan, 0], np.float32), ())
    assert np.isnan(rows.values).tolist() == [[True]]
