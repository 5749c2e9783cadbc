"""Multi-vectors: late interaction compared with sentence-transformers, which reads PyLate's and Stanford's too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from embert import engine
from embert.engine.errors import BrokenModel, InputError, ModelError, UnsupportedModel
from embert.engine.tasks import Task
from embert.engine.tokenization.encoded import TokenizeOptions
from tests.engine.conftest import unit
from tests.engine.heads.late_interaction import (
    COLUMNS,
    LETTERS,
    SPECIAL,
    encoder,
    expanded_sequences,
    linear,
    masked_vectors,
    pylate,
    save_tokenizer,
    stanford,
)
from tests.oracles.model_cases import list_modules
from tests.server.models import edit_json

POOLING = "4_HierarchicalTokenPooling/config.json"
QUERIES = ["who is it?", "a", "", "what, then. " * 9]
DOCUMENTS = ["it is a cat!", "", "...", "don't", "no dog, no cat. " * 12, "[MASK]", "a [MASK]"]


def native(folder: Path, expansion: dict[str, Any] | None, **mask: Any) -> Path:
    """sentence-transformers' own files, written by hand; `pool` are those of HierarchicalTokenPooling."""
    pool = mask.pop("pool", None)
    encoder(folder, case=mask.pop("case", "bert"))
    kinds = {
        "base.modules.transformer.Transformer": "",
        "base.modules.dense.Dense": "1_Dense",
        "multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask": "2_MultiVectorMask",
        "base.modules.normalize.Normalize": "3_Normalize",
        "multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling": "4_HierarchicalTokenPooling",
    }
    if pool is None:
        kinds.popitem()
    list_modules(folder, *((f"sentence_transformers.{kind}", path) for kind, path in kinds.items()))
    tokens = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    dense = {"in_features": 64, "out_features": COLUMNS, "bias": True}
    files = {
        "sentence_bert_config.json": {"query_length": 30, "document_length": 40, "query_expansion": expansion},
        "config_sentence_transformers.json": {
            "model_type": "MultiVectorEncoder",
            "prompts": {"query": "q ", "document": "d, ", "none": None},
        },
        "1_Dense/config.json": {**dense, **tokens, "activation_function": "torch.nn.modules.activation.Tanh"},
        "2_MultiVectorMask/config.json": {"skiplist_words": [","], **mask},
        "3_Normalize/config.json": tokens,
        POOLING: pool or {},
    }
    for name, fields in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(fields))
    bias = torch.randn(COLUMNS, generator=torch.Generator().manual_seed(2)) * 0.2
    save_file({"linear.weight": linear(), "linear.bias": bias}, folder / "1_Dense" / "model.safetensors")
    return folder


def fixed(attend: bool) -> dict[str, Any]:
    return {"strategy": "fixed", "attend": attend, "length": 20, "token": None}


def without(folder: Path, *names: str) -> Path:
    path = folder / "config_sentence_transformers.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key not in names}))
    return folder


def limited(folder: Path) -> Path:
    edit_json(folder / "sentence_bert_config.json", processing_kwargs={"text": {"max_length": 9}})
    return folder


def byte_level(folder: Path) -> Path:
    """The tokenizer's tokens after a space are others."""
    tokens = [*SPECIAL, *LETTERS, *"!?.,'Ġ", *(f"Ġ{letter}" for letter in "wait")]
    merges = [("Ġ", letter) for letter in "wait"]
    tokenizer = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    save_tokenizer(folder)
    return folder


# "min" cuts nothing, and expands shorter queries only.
FOLDERS: dict[str, Callable[[Path], Path]] = {
    "expanded": lambda folder: native(folder, fixed(False)),
    "attended": lambda folder: native(folder, fixed(True)),
    "at least": lambda folder: native(folder, {**fixed(False), "strategy": "min", "length": 12}),
    "not expanded": lambda folder: native(folder, None, skiplist_tasks=["query", "document"]),
    "some tokens only": lambda folder: native(folder, fixed(False), keep_only_token_ids=[2, *range(10, 20), 63]),
    "pooled": lambda folder: native(folder, fixed(False), pool={"pool_factor": 2}),
    "pooled to unit length": lambda folder: native(
        folder,
        fixed(True),
        pool={
            "pool_factor": 1.5,
            "num_protected_tokens": 0,
            "normalize_embeddings": True,
            "tasks": ["query", "document"],
        },
    ),
    "not pooled": lambda folder: native(folder, None, pool={"pool_factor": 1.0, "normalize_embeddings": True}),
    "mpnet": lambda folder: native(folder, fixed(False), case="mpnet"),
    "pylate": pylate,
    "pylate, modernbert": lambda folder: pylate(folder, case="modernbert"),
    "pylate, lfm2": lambda folder: pylate(folder, case="lfm2, biases"),
    "pylate, attended": lambda folder: pylate(folder, attend_to_expansion_tokens=True),
    "pylate, not expanded": lambda folder: pylate(folder, do_query_expansion=False, skiplist_words=None),
    "pylate, by the library's name": lambda folder: pylate(
        folder, query_expansion={"strategy": "min", "attend": True, "length": 8}, query_prefix=None
    ),
    "pylate, nothing stated": lambda folder: without(
        pylate(folder), "query_prefix", "query_length", "document_length", "do_query_expansion", "skiplist_words"
    ),
    "pylate, words in the vocabulary": lambda folder: pylate(folder, query_prefix="a", document_prefix="[unused1] b "),
    "pylate, limits of a call": lambda folder: limited(pylate(folder)),
    "pylate, prompts": lambda folder: pylate(folder, query_prefix="ask: ", prompts={"document": "[D] text: "}),
    "stanford": stanford,
    "stanford, byte-level": lambda folder: byte_level(stanford(folder)),
    "stanford, attended": lambda folder: stanford(folder, attend_to_mask_tokens=True, mask_punctuation=False),
}


@pytest.mark.parametrize("files", FOLDERS)
def test_sentence_transformers(tmp_path: Path, files: str) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not of every environment")
    folder = FOLDERS[files](tmp_path / "model")
    if not hasattr(library, "MultiVectorEncoder"):
        pytest.skip("this sentence-transformers is older than multi-vectors")
    theirs = library.MultiVectorEncoder(str(folder), device="cpu")
    with engine.Engine.load(str(folder), device="cpu") as loaded:
        assert loaded.model.tasks == Task.MULTI
        assert loaded.model.task_names == ["multi_vector", "rerank"]
        found = {True: loaded.embed_multi(QUERIES, is_query=True), False: loaded.embed_multi(DOCUMENTS)}
        sims = np.array([loaded.score([(query, document) for document in DOCUMENTS]) for query in QUERIES])
        ranks = loaded.rerank(QUERIES[0], DOCUMENTS, top_n=3)
    wanted = {
        True: [np.asarray(theirs.encode_query(text, convert_to_numpy=True)) for text in QUERIES],
        False: [np.asarray(theirs.encode_document(text, convert_to_numpy=True)) for text in DOCUMENTS],
    }
    for is_query, expected in wanted.items():
        for ours, one in zip(found[is_query], expected, strict=True):
            assert ours.shape == one.shape
            assert (unit(ours.astype(np.float64)) * unit(one)).sum(1).min(initial=1) >= 0.99999
            np.testing.assert_allclose(ours, one, rtol=0, atol=1e-3)
    scores = theirs.similarity(wanted[True], wanted[False]).numpy()
    np.testing.assert_allclose(sims, scores, rtol=1e-4)
    assert [rank.index for rank in ranks] == np.argsort(-sims[0], kind="stable")[:3].tolist()
    apart = np.abs(scores[:, :, None] - scores[:, None, :]) > 1e-3
    order = np.sign(sims[:, :, None] - sims[:, None, :]) == np.sign(scores[:, :, None] - scores[:, None, :])
    assert (order | ~apart).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_added_tokens_that_nothing_attends_to(tmp_path: Path, dtype: str) -> None:
    """HuggingFace's attention mask, by hand, in batches of expanded and other texts; the longest in bfloat16 too."""
    folder, sequences = pylate(tmp_path / "model", query_length=100), expanded_sequences()
    loaded = engine.load_encoder(engine.load_model(str(folder)), device="cpu", dtype=dtype)
    rows = loaded.wait(loaded.submit(engine.pack(sequences).with_tasks(Task.MULTI)))[Task.MULTI]
    assert rows.counts.tolist() == [len(ids) for ids in sequences]
    for number, expected in enumerate(masked_vectors(folder, sequences)):
        ours = rows.slice(number, number + 1).values
        assert (ours * expected).sum(1).min() >= (0.99999 if dtype == "float32" else 0.995)


def test_lengths_of_queries_and_documents(tmp_path: Path) -> None:
    assert engine.load_model(str(pylate(tmp_path / "pylate"))).max_input_length == 40  # not the 17 that PyLate left
    model = engine.load_model(str(stanford(tmp_path / "stanford")))
    assert model.max_input_length == 40
    tokenizer = engine.Tokenizer(model)
    texts = ["a", "a" * 50]
    queries = tokenizer.encode(texts, TokenizeOptions(is_query=True), prompt=model.prompts["query"])
    assert (queries.lengths.tolist(), queries.truncated) == ([20, 20], 1)
    assert queries.ids[:4].tolist() == [2, 5, 7, 3]
    assert set(queries.ids[4:20].tolist()) == {4}
    documents = tokenizer.encode(texts, TokenizeOptions(is_query=False), prompt=model.prompts["document"])
    assert (documents.lengths.tolist(), documents.truncated) == ([4, 40], 1)
    assert documents.ids[-1] == 3
    known = tokenizer.encode_known(["a"], TokenizeOptions(is_query=True), prompt=model.prompts["query"])
    assert known is not None
    assert known.ids.tolist() == queries.ids[:20].tolist()
    for is_query, limit in ((True, 20), (False, 40)):
        with pytest.raises(InputError, match=rf"text 1 has 52 tokens, the limit is {limit}"):
            tokenizer.encode(texts, TokenizeOptions(truncate=False, is_query=is_query))


TRANSFORMER, DENSE, MASK = "sentence_bert_config.json", "1_Dense/config.json", "2_MultiVectorMask/config.json"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (DENSE, {"use_residual": True}, "use_residual True"),
        (DENSE, {"in_features": 63}, "1_Dense takes 63 columns, but its input has 64"),
        (MASK, {"keep_only_token_ids": [7, -1]}, "keep_only_token_ids must be a list of token ids, found [7, -1]"),
        (POOLING, {"pool_factor": 0.5}, "pool_factor must be a number of at least 1, found 0.5"),
        (POOLING, {"num_protected_tokens": -1}, "num_protected_tokens must be an int of at least 0, found -1"),
        (POOLING, {"tasks": ["image"]}, "tasks ['image'] is not supported"),
        (MASK, {"skiplist_tasks": ["image"]}, "skiplist_tasks ['image']"),
        (TRANSFORMER, {"document_length": 0}, "document_length must be a positive int, found 0"),
        (TRANSFORMER, {"query_expansion": {"strategy": "other"}}, "query_expansion"),
        (TRANSFORMER, {"query_expansion": {**fixed(True), "length": 129}}, "129 tokens, the model takes 128"),
        (TRANSFORMER, {"query_expansion": {**fixed(True), "token": "[NONE]"}}, "token '[NONE]'"),
        ("3_Normalize/config.json", {"module_input_name": "sentence_embedding"}, "Normalize after MultiVectorMask"),
    ],
)
def test_fields_that_are_refused(tmp_path: Path, name: str, fields: dict[str, Any], message: str) -> None:
    folder = native(tmp_path / "model", None, pool={})
    edit_json(folder / name, **fields)
    with pytest.raises(ModelError) as caught:
        engine.load_model(str(folder))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_deberta_attends_to_its_expansion_or_is_refused(tmp_path: Path) -> None:
    engine.load_model(str(pylate(tmp_path / "attended", case="deberta-v2", attend_to_expansion_tokens=True)))
    with pytest.raises(UnsupportedModel, match="without attend_to_expansion_tokens is not supported for deberta-v2"):
        engine.load_model(str(pylate(tmp_path / "hidden", case="deberta-v2")))


def test_weights_that_are_missing(tmp_path: Path) -> None:
    folder = native(tmp_path / "model", None)
    save_file({"linear.weight": linear()}, folder / "1_Dense" / "model.safetensors")
    with pytest.raises(BrokenModel, match=r"1_Dense/model\.safetensors has no tensor linear\.bias$"):
        engine.load_encoder(engine.load_model(str(folder)), device="cpu")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:3]))
    with pytest.raises(UnsupportedModel, match="Dense on tokens without Normalize is not supported"):
        engine.load_model(str(folder))
    other = stanford(tmp_path / "other", query_token_id="[none]")
    with pytest.raises(BrokenModel, match=r"the marker '\[none\]' is not a token of"):
        engine.load_model(str(other))
