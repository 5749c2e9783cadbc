"""A batch of sequences of different adapters, and what makes an encoder on a stand-in for the extension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from embert import engine
from embert.engine.batch import PackedBatch
from embert.engine.encoders.cuda.encoder import CudaEncoder
from tests.engine.conftest import random_sequences
from tests.engine.stand_in_gpu import StandInGpu
from tests.oracles.jina_v3 import VOCABULARY

LENGTHS = [1, 2, 15, 64, 3, 127, 128, 40, 40, 7, 1, 90]
ADAPTERS = np.array([0, 1, 2, 3, 4, -1, 2, 0, 4, -1, 3, 1], np.int8)
TOKENS = sum(LENGTHS)

Make = Callable[..., tuple[CudaEncoder, StandInGpu]]


def packed(lengths: list[int] = LENGTHS, adapters: Any = ADAPTERS, **more: Any) -> PackedBatch:
    sequences = random_sequences(lengths, VOCABULARY)
    return engine.pack(sequences, adapters=None if adapters is None else np.array(adapters, np.int8), **more)
