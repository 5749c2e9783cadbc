"""The CUDA encoder's vectors against those of transformers: architectures, types, poolings, options of a request."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from embert import engine
from embert.engine.batch import PackedBatch
from embert.engine.encoders.cuda.encoder import CudaEncoder
from embert.engine.tasks import Task
from tests.csrc.encoder.random_models import (
    LARGE,
    MAX_TOKENS,
    NARROW,
    agrees,
    hugging_face,
    in_parts,
    packed,
    part,
    random_bert,
    relative_error,
)
from tests.oracles import model_cases
from tests.oracles.exact import cosines

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("config", [{}, LARGE, NARROW], ids=["base", "large", "narrow"])
def test_1000_sequences_against_hugging_face(
    tmp_path: Path, random: np.random.Generator, config: dict[str, Any]
) -> None:
    folder = random_bert(tmp_path, **config)
    batch = packed(random, random.integers(1, 513, 1000))
    ours = CudaEncoder(engine.load_model(str(folder)), max_batch_tokens=MAX_TOKENS)
    got = in_parts(ours, batch)
    ours.close()
    wanted = hugging_face(folder, batch, torch.float64)
    cosine = cosines(got, wanted)
    assert float(np.median(cosine)) >= 0.99999
    assert cosine.min() >= 0.9999
    assert relative_error(got, wanted) <= 0.8 * relative_error(hugging_face(folder, batch, torch.float16), wanted)


@pytest.mark.parametrize("case", ["roberta, padded with 5", "xlm-roberta", "mpnet"])
@pytest.mark.parametrize("graphs", [True, False])
def test_padding_tokens_inside_texts(tmp_path: Path, case: str, graphs: bool) -> None:
    folder = model_cases.build(tmp_path, case, vocab_size=30522)
    (folder / "tokenizer.json").write_text("{}")
    model = engine.load_model(str(folder))
    ours = CudaEncoder(model, max_batch_tokens=MAX_TOKENS, graphs=graphs)
    padding = model.config.padding_id
    assert padding is not None
    random = np.random.default_rng(0)
    patterns = ["p", "pt", "tp", "tptt", "ttpp", "pptt", "ptptp", "tttp" * 30, "p" * 128, "ttttt", "t" * 128]
    texts = [np.where([c == "p" for c in each], padding, random.integers(10, 30000, len(each))) for each in patterns]
    lengths = np.array([len(text) for text in texts])
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    batch = PackedBatch(np.concatenate(texts).astype(np.int32), cu_seqlens)
    everyone = np.arange(len(texts))
    together = ours.encode(part(batch, everyone))
    wanted = engine.load_encoder(model, device="cpu").encode(part(batch, everyone))
    assert cosines(together, wanted).min() >= 0.9999
    for row in everyone:  # alone, those without padding are a graph
        assert agrees(ours, ours.encode(part(batch, everyone[row : row + 1])), together[row : row + 1])
    ours.close()


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_every_kernel_of_a_small_model(tmp_path: Path, random: np.random.Generator, pooling: str) -> None:
    """Few rows and many, graphs and none: small enough for scripts/sanitize, against transformers on the CPU."""
    folder = random_bert(
        tmp_path, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024, vocab_size=30522
    )
    ours = CudaEncoder(dataclasses.replace(engine.load_model(str(folder)), pooling=pooling), max_batch_tokens=4096)
    batch = packed(random, np.array([20, 100, 512, *[150] * 20]))
    together = ours.encode(batch)
    for rows in (np.array([0]), np.array([1]), np.array([2]), np.array([0, 1, 2])):
        few = PackedBatch(part(batch, rows).ids, part(batch, rows).cu_seqlens)
        assert agrees(ours, ours.encode(few), together[rows])
    model: Any = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32)
    ids = torch.tensor(batch.ids[batch.cu_seqlens[1] : batch.cu_seqlens[2]].astype(np.int64))
    with torch.inference_mode():
        states = model.eval()(input_ids=ids[None]).last_hidden_state[0]
    wanted = (states[0] if pooling == "cls" else states.mean(0)).numpy()
    assert together[1] @ wanted / np.linalg.norm(wanted) >= 0.99999
    ours.close()


def test_an_empty_batch(encoder: CudaEncoder) -> None:
    empty = PackedBatch(np.empty(0, np.int32), np.zeros(1, np.int32))
    assert encoder.encode(empty).shape == (0, 768)
    assert encoder.wait(encoder.submit(empty.with_tasks(Task.TOKENS))) == {}
