"""Stands in for the extension `embert.engine._cuda` where there is no GPU: the same calls, computed by the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine.encoders.torch.encoder import TorchEncoder
from embert.engine.model import Model
from embert.engine.packing import PackedBatch
from embert.engine.tasks import Task
from tests.engine.conftest import Floats

__all__ = ["StandInEncoder", "StandInGpu"]


class Refused(RuntimeError):
    """As the extension raises it."""


class Lost(RuntimeError):
    """As the extension raises it."""


class StandInGpu:
    """The extension. `spoil` changes pooled vectors, as broken kernels would."""

    Refused, Lost = Refused, Lost

    def __init__(
        self,
        model: Model,
        *,
        capability: int = 90,
        gemm: str = "hopper",
        spoil: Callable[[Floats], Floats] | None = None,
    ) -> None:
        self.model, self.gemm, self.spoil = model, gemm, spoil
        self.capability = capability
        self.encoders: list[StandInEncoder] = []
        self.tickets = 0

    def device_count(self) -> int:
        """One GPU."""
        return 1

    def device_info(self, index: int) -> tuple[str, int, int]:
        """Name, compute capability, bytes."""
        assert index == 0
        return "A GPU", self.capability, 1 << 34

    def make_encoder(self, **shape: Any) -> StandInEncoder:
        """Make an encoder, and keep it in `encoders`."""
        self.encoders.append(StandInEncoder(self, shape))
        return self.encoders[-1]


class StandInEncoder:
    """The extension's encoder."""

    folds, memory = True, (0, 0, 0)

    def __init__(self, gpu: StandInGpu, shape: dict[str, Any]) -> None:
        self.gpu, self.shape, self.gemm = gpu, shape, gpu.gemm
        self.loaded: dict[tuple[str, int], npt.NDArray[Any]] = {}  # by name and layer, as stored
        self.batches: list[tuple[Any, ...]] = []
        self._answers: dict[int, Floats] = {}
        self._cpu = TorchEncoder(gpu.model, max_batch_tokens=1 << 20)

    def load(self, name: str, layer: int, data: npt.NDArray[np.uint8], shape: list[int], dtype: str) -> None:
        """Keep a tensor."""
        assert (name, layer) not in self.loaded
        stored = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype]
        self.loaded[name, layer] = data.view(stored).reshape(shape).copy()

    def start(self) -> str:
        """Start. LayerNorms are folded."""
        return ""

    def submit(self, ids: Any, cu_seqlens: Any, types: Any, positions: Any, dims: Any, norm: Any, tokens: bool) -> int:
        """Compute at once. Positions are only recorded, because the CPU encoder finds its own."""
        self.batches.append((ids, cu_seqlens, types, positions, dims, norm, tokens))
        states = self._cpu.encode(PackedBatch(ids, cu_seqlens, types), Task.TOKENS)
        pool = {
            "mean": lambda x: x.mean(0),
            "cls": lambda x: x[0],
            "max": lambda x: x.max(0),
            "last-token": lambda x: x[-1],
        }
        texts = np.split(states, cu_seqlens[1:-1])
        answer = states if tokens else np.stack([pool[self.gpu.model.pooling](text) for text in texts])
        if not tokens and self.gpu.spoil is not None:
            answer = self.gpu.spoil(answer)
        self.gpu.tickets += 1
        self._answers[self.gpu.tickets] = answer
        return self.gpu.tickets

    def wait(self, ticket: int) -> Floats:
        """The answer. Each ticket is valid once."""
        if ticket not in self._answers:
            raise Refused("this ticket is not in flight")
        return self._answers.pop(ticket)
