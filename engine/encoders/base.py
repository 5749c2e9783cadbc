"""The encoder protocol: packed token ids in, the rows of each task out (batch.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from embert.engine.batch import PackedBatch, TaskOutput
from embert.engine.errors import EncoderError
from embert.engine.model import Model
from embert.engine.models.encoder_config import DynamicNtk
from embert.engine.quantization.accuracy import Int8Accuracy
from embert.engine.tasks import NO_SHARING, NO_TASK, Sharing, Task


def check_finite(
    rows: TaskOutput, numbers: Sequence[int] | npt.NDArray[np.intp] | None = None, what: str = "text"
) -> None:
    """Raise EncoderError, which names the sequence, for rows with a NaN or an infinity.

    `numbers` are the caller's numbers of the sequences, if not 0 … n - 1; `what` is its word for one.
    """
    sequence = rows.first_not_finite()
    if sequence is not None:
        number = sequence if numbers is None else numbers[sequence]
        raise EncoderError(f"the encoder returned a vector that is not finite, for {what} {number}")


def shared_tasks(model: Model) -> Task:
    """Tasks that read the last token's row only, where earlier rows do not depend on what follows them."""
    config = model.config
    kinds = [config.attention_of(layer) for layer in range(config.layers)]
    # With DynamicNtk the angles depend on the length of a text.
    plain = all(
        kind.convolution is None and not (kind.rotary and isinstance(kind.rotary.scaling, DynamicNtk)) for kind in kinds
    )
    shares = NO_TASK
    if config.causal and plain:
        for task, row in model.poolings.items():
            if row == "last-token":
                shares |= task
    return shares


class Encoder(Protocol):
    """Runs batches of one model on one device.

    Used by one thread at a time. Two batches may be in flight: submit N + 1, then wait for N. An encoder inherits from
    this class for the sake of `encode`.
    """

    name: str  # "cuda", "cpu", "torch"
    device: str  # "cpu", "cuda:0"
    device_name: str  # for people: "AMD EPYC", "NVIDIA H100 80GB HBM3"
    dtype: str  # "float32", "float16", "bfloat16", "int8"
    width: int  # columns of EMBED's rows
    hidden_size: int  # columns of TOKENS' rows
    max_batch_tokens: int  # the largest T that submit takes
    choice: str  # why load_encoder chose this encoder, for the start-up log; set by load_encoder
    int8_accuracy: Int8Accuracy | None = None  # against the default dtype; set by load_encoder for int8
    sharing: Sharing = NO_SHARING

    @property
    def batch_tokens(self) -> int:
        """Batch size in tokens above which throughput stops growing. A longer text gets its own batch."""
        return self.max_batch_tokens

    def submit(self, batch: PackedBatch) -> Any:
        """Start a forward and return a ticket for `wait`. The arrays may be reused as soon as it returns."""
        ...

    def wait(self, ticket: Any) -> dict[Task, TaskOutput]:
        """Return the rows of each task that a sequence of the batch wants; columns past `dimensions` are 0.

        Raises EncoderError if this forward failed, EncoderLost if no later one can work either.
        """
        ...

    def close(self) -> None:
        """Release threads and memory. The encoder cannot be used afterwards."""
        ...

    def encode(self, batch: PackedBatch, task: Task = Task.EMBED) -> npt.NDArray[np.float32]:
        """Submit and wait, for one task of all sequences: the values of its rows.

        Raises EncoderError as `wait` does, and for a value that is not finite.
        """
        rows = self.wait(self.submit(batch.with_tasks(task)))[task]
        check_finite(rows)
        return rows.values
