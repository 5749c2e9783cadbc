"""Workloads of benchmarks.encoder.cpu: how many texts, and how many tokens they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.lib.texts import Lengths, texts


@dataclass(frozen=True, slots=True)
class Uniform(Lengths):
    """A uniform distribution of lengths from `low` to `high` tokens."""

    def draw(self, count: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
        """Return int64 [count]."""
        return random.integers(self.low, self.high + 1, count)


@dataclass(frozen=True, slots=True)
class Workload:
    """One call: `count` texts whose lengths follow `lengths`."""

    name: str
    count: int
    lengths: Lengths

    def texts(self, tokenizer: Path, scale: float) -> Sequence[str]:
        """Return the same texts on every machine; `scale` is the share of `count` to make, at least one text."""
        count = max(1, round(self.count * scale)) if self.count > 1 else 1
        return [text.text for text in texts(self.lengths, count, tokenizer, seed=1)]


def _exactly(tokens: int) -> Lengths:
    return Lengths(tokens, tokens, tokens)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("query", 512, Uniform(16, 8, 24)),
        Workload("passage", 256, Lengths(mean=104, low=16, high=256)),
        Workload("uniform512", 64, Uniform(256, 3, 512)),
        Workload("128x128", 128, _exactly(128)),
        Workload("32x512", 32, _exactly(512)),
        Workload("1x16", 1, _exactly(16)),
        Workload("1x128", 1, _exactly(128)),
        Workload("1x512", 1, _exactly(512)),
    )
}
