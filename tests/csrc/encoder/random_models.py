"""Models with random weights, encoders of them, batches of random texts, and the vectors of transformers."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from embert import engine
from embert.engine.batch import PackedBatch, TaskOutput, cumulative
from embert.engine.encoders.cuda.encoder import CudaEncoder
from embert.engine.errors import UnsupportedModel
from embert.engine.model import Model

MAX_TOKENS = 16384
# Hidden size 384 has a separate kernel for the feed-forward layer where rows are many.
NARROW = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
Floats = npt.NDArray[Any]


def random_bert(folder: Path, dtype: torch.dtype = torch.float32, /, **config: Any) -> Path:
    """A model with random weights. Its LayerNorms are not identities."""
    (folder / "tokenizer.json").write_text("{}")
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.BertModel(transformers.BertConfig(**config), add_pooling_layer=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("LayerNorm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("LayerNorm.bias"):
                parameter.normal_(0.0, 0.1)
    model.to(dtype).save_pretrained(folder)  # type: ignore[operator]
    return folder


def make_encoder(model: Model, **options: Any) -> CudaEncoder:
    """An encoder on the GPU. Skips what this GPU or this build cannot run: int8, and cuBLASLt without its header."""
    try:
        return CudaEncoder(model, **{"max_batch_tokens": MAX_TOKENS, **options})
    except UnsupportedModel as error:
        if not re.search(r"this build has no cuBLASLt|needs (a GPU of )?compute capability 9\.0", str(error)):
            raise
        pytest.skip(str(error))


def with_cublaslt(folder: Path, pooling: str = "mean", **options: Any) -> CudaEncoder:
    return make_encoder(dataclasses.replace(engine.load_model(str(folder)), pooling=pooling), **options)


def packed(random: np.random.Generator, lengths: npt.NDArray[np.int64], **more: Any) -> PackedBatch:
    ids = random.integers(1000, 30000, int(lengths.sum())).astype(np.int32)
    return PackedBatch(ids, cumulative(lengths), **more)


def part(batch: PackedBatch, rows: npt.NDArray[np.int64]) -> PackedBatch:
    """Some sequences of a batch, in the order given, with raw vectors requested."""
    return dataclasses.replace(batch.take(rows), normalize=np.zeros(len(rows), np.bool_))


def agrees(encoder: CudaEncoder, got: Floats, single: Floats) -> bool:
    """True if texts have the same bits as in other batches, or are equal up to rounding where no bits are promised."""
    return bool((got == single).all()) or (encoder.gemm != "hopper" and relative_error(got, single) <= 2e-3)


def in_parts(encoder: CudaEncoder, batch: PackedBatch) -> Floats:
    lengths = np.diff(batch.cu_seqlens)
    groups = np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(np.cumsum(lengths) // (MAX_TOKENS - 512))) + 1)
    return np.concatenate([encoder.encode(part(batch, rows)) for rows in groups])


def hugging_face(folder: Path, batch: PackedBatch, dtype: torch.dtype, pooling: str = "mean") -> Floats:
    """Pooled vectors of transformers on the GPU, sequences of like length together."""
    model: Any = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False, dtype=dtype)
    model.cuda().eval()
    lengths = np.diff(batch.cu_seqlens)
    vectors = np.empty((len(lengths), model.config.hidden_size))
    order = np.argsort(lengths)
    for start in range(0, len(order), 64):
        rows = order[start : start + 64]
        ids = np.zeros((len(rows), lengths[rows].max()), np.int64)
        for at, row in enumerate(rows):
            ids[at, : lengths[row]] = batch.ids[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]]
        mask = torch.tensor(np.arange(ids.shape[1]) < lengths[rows][:, None], device="cuda")
        with torch.inference_mode():
            states = model(input_ids=torch.tensor(ids, device="cuda"), attention_mask=mask).last_hidden_state.double()
        if pooling == "mean":
            vector = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        elif pooling == "max":
            vector = states.masked_fill(~mask[..., None], -torch.inf).amax(1)
        else:
            vector = states[:, 0] if pooling == "cls" else states[torch.arange(len(rows)), mask.sum(1) - 1]
        vectors[rows] = vector.cpu().numpy()
    return vectors


def relative_error(got: Floats, wanted: Floats) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def as_dense(rows: TaskOutput, columns: int = 30522) -> Floats:
    """Sparse vectors with their zeros: [sequences, columns]."""
    assert rows.indices is not None
    dense = np.zeros((rows.sequences, columns))
    dense[np.repeat(np.arange(rows.sequences), rows.counts), rows.indices] = rows.values[:, 0]
    return dense
