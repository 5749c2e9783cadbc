"""Two batches are in flight at a time, and what is refused harms neither of them; memory does not grow."""

from __future__ import annotations

import numpy as np
import pytest

from embert.engine.batch import PackedBatch
from embert.engine.encoders.cuda.encoder import CudaEncoder
from embert.engine.errors import EncoderError
from embert.engine.tasks import Task
from tests.csrc.encoder.random_models import packed

pytestmark = pytest.mark.gpu


def test_two_batches_in_flight(encoder: CudaEncoder, random: np.random.Generator) -> None:
    batches = [packed(random, random.integers(1, 200, int(n))) for n in random.integers(1, 90, 20)]
    single = [encoder.encode(batch) for batch in batches]
    tickets = [encoder.submit(batches[0])]
    for i, batch in enumerate(batches[1:]):
        tickets.append(encoder.submit(batch))
        assert (encoder.wait(tickets[i])[Task.EMBED].values == single[i]).all()
    assert (encoder.wait(tickets[-1])[Task.EMBED].values == single[-1]).all()


def test_a_batch_that_is_refused_harms_none_in_flight(encoder: CudaEncoder, random: np.random.Generator) -> None:
    batch = packed(random, np.array([40, 300]))
    wanted = encoder.encode(batch)
    ticket = encoder.submit(batch)
    for wrong in (-1, 769):
        with pytest.raises(EncoderError, match=f"dimensions.* 768.* {wrong}"):
            encoder.submit(PackedBatch(batch.ids, batch.cu_seqlens, dimensions=np.array([wrong, 0], np.int32)))
    assert (encoder.wait(ticket)[Task.EMBED].values == wanted).all()


@pytest.mark.exclusive
def test_memory_is_bounded_and_does_not_grow(encoder: CudaEncoder, random: np.random.Generator) -> None:
    def encode_batches(count: int) -> None:
        for _ in range(count):
            encoder.encode(packed(random, random.integers(1, 513, int(random.integers(1, 40)))))

    encode_batches(50)
    weights, _, before = encoder.memory
    assert before - weights <= 600e6
    encode_batches(1000)
    assert encoder.memory[2] <= before
