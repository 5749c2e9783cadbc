"""The reference encoder: every supported type in torch, on any CPU, in float32 or bfloat16."""

from __future__ import annotations

import torch

from embert.engine.batch import TaskOutput
from embert.engine.encoders.cpu.encoder import CpuEncoder, Ticket
from embert.engine.encoders.cpu.runs import Run
from embert.engine.encoders.torch.operators import TorchOperators
from embert.engine.tasks import Task


class TorchEncoder(CpuEncoder):
    """Encoder whose layers are computed by torch, and whose heads by numpy."""

    name = "torch"
    dtypes = ("float32", "bfloat16")
    few_tokens_threads = 2
    shares_kernels = False
    has_prefixes = False

    def _operators(self) -> TorchOperators:
        self.choice = "torch's operators"
        return TorchOperators(getattr(torch, self.dtype))

    def _run(self, ticket: Ticket, run: Run) -> dict[Task, TaskOutput]:
        with torch.inference_mode():  # the mode belongs to the thread
            return super()._run(ticket, run)
