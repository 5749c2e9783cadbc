"""A small random checkpoint of every model_type, and what its own class computes of it, in float64 and in float16.

JinaBERT v2 has no class in transformers: its formulas are in tests/oracles/jina_bert_v2.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from embert import engine
from embert.engine.batch import PackedBatch
from embert.engine.model import Model
from tests.csrc.reference import row_errors
from tests.oracles.exact import hidden_states
from tests.oracles.jina_bert_v2 import JinaBert
from tests.oracles.jina_v3 import flash, peft
from tests.oracles.model_cases import JINA, JINA_BERT, PEFT, ROUTED, build, byte_level
from tests.oracles.nomic_bert import EXPERTS, Older

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ModelCheckpoint:
    """A checkpoint, texts for it, and what its class makes of them."""

    model: Model
    batch: PackedBatch  # vectors are wanted as they are
    states: Callable[[torch.dtype], list[Doubles]]  # of each text, [L, hidden], computed in a type

    def pooled(self, dtype: torch.dtype) -> Doubles:
        """The mean of each text's states."""
        return np.stack([rows.mean(0) for rows in self.states(dtype)])


def model_checkpoint(folder: Path, name: str, lengths: Sequence[int]) -> ModelCheckpoint:
    """Write one of CHECKPOINTS, with texts of these lengths.

    Where there are adapters, texts have one each, or none.
    """
    random = np.random.default_rng(7)
    texts = [random.integers(10, 60, length).astype(np.int32) for length in lengths]  # none is padding
    if name == JINA_BERT:
        jina_bert = JinaBert(folder)
        byte_level(300).save(str(folder / "tokenizer.json"))
    elif name == ROUTED:
        nomic_bert = Older(folder, **EXPERTS)
    elif name in (JINA, PEFT):
        jina = (flash if name == JINA else peft)(folder)
    else:
        byte_level(300).save(str(build(folder, name) / "tokenizer.json"))
    model = engine.load_model(str(folder), pooling="mean")
    adapters = model.config.adapters
    numbers = (np.arange(len(texts)) % 6 - 1).astype(np.int8)

    def states(dtype: torch.dtype) -> list[Doubles]:
        if name == JINA_BERT:
            return [jina_bert.hidden(ids, dtype=dtype) for ids in texts]
        if name == ROUTED:
            return [nomic_bert.hidden(ids, dtype=dtype) for ids in texts]
        if adapters is None:
            return hidden_states(folder, texts, dtype=dtype)
        tasks = [adapters.names[number] if number >= 0 else None for number in numbers]
        return [jina.hidden(ids, task, dtype=dtype) for ids, task in zip(texts, tasks, strict=True)]

    as_they_are = np.zeros(len(texts), np.bool_)
    batch = engine.pack(texts, normalize=as_they_are, adapters=None if adapters is None else numbers)
    return ModelCheckpoint(model, batch, states)


def check_rounding(
    got: npt.NDArray[np.floating], of: ModelCheckpoint, dtype: torch.dtype = torch.float16, *, folded: bool = True
) -> None:
    """The error of pooled vectors is at most that of the model's own class in `dtype`, the mean square over all texts.

    1.25 times as large where rounding is as there: of the outputs of LayerNorms that are not folded into products, and
    of rows that are sums over all layers. The worst of some dozen texts may be twice as far off as the class's worst:
    both are chance (1.3 times were seen), and a text whose kernels are wrong is off by far more. With experts the
    medians are compared: rounding decides which experts a few rows pass, and their texts are off by far more.
    """
    config = of.model.config
    as_there = not folded or config.shared_layers or config.pre_norm
    exact = of.pooled(torch.float64)
    ours, theirs = row_errors(got, exact), row_errors(of.pooled(dtype), exact)
    means = (np.median(ours), np.median(theirs)) if config.experts is not None else (_mean(ours), _mean(theirs))
    print(f"mean square {means[0]:.2e}, theirs {means[1]:.2e}; worst {ours.max():.2e}, theirs {theirs.max():.2e}")
    assert means[0] <= (1.25 if as_there else 1) * means[1]
    assert config.experts is not None or ours.max() <= 2 * theirs.max()


def _mean(of: Doubles) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.mean(np.square(of))))
