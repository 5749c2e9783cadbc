"""Batches on a GPU are cut by adapter and put together again, with a stand-in for the extension that computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from embert.engine import Task
from embert.engine.batch import PackedBatch
from embert.engine.encoders.cuda.adapters import parts_of
from embert.engine.errors import EncoderError, EncoderLost
from embert.engine.model import Model
from tests.engine.adapters.on_gpu import ADAPTERS, LENGTHS, Make, packed
from tests.engine.stand_in_gpu import Lost, Refused, StandInEncoder, StandInGpu
from tests.oracles.jina_v3 import TASKS, Jina


def lengths_run(gpu: StandInGpu) -> list[list[list[int]]]:
    """The lengths of the sequences of each batch that each encoder was given."""
    return [[np.diff(cu_seqlens).tolist() for _, cu_seqlens, *_ in each.batches] for each in gpu.encoders]


def expected(jina: Jina, batch: PackedBatch, adapters: Any = ADAPTERS) -> list[npt.NDArray[np.float64]]:
    """The oracle's hidden states of each sequence; `adapters` are numbers in its own order."""
    split = batch.cu_seqlens[1:-1]
    types = np.split(np.zeros_like(batch.ids) if batch.token_types is None else batch.token_types, split)
    texts = zip(np.split(batch.ids, split), adapters, types, strict=True)
    return [jina.hidden(ids, TASKS[number] if number >= 0 else None, kinds) for ids, number, kinds in texts]


def test_what_each_sequence_wants_stays_with_it(model: Model, make: Make, jina: Jina) -> None:
    """Tasks, dimensions and normalizing of single sequences, of which some parts have none that wants a task."""
    encoder, _ = make(model)
    tasks = [Task.EMBED if number in (0, 4) else Task.TOKENS if number == 1 else Task.EMBED | Task.TOKENS
             for number in ADAPTERS]  # fmt: skip
    dimensions, normalize = np.arange(len(LENGTHS), dtype=np.int32) * 4, np.arange(len(LENGTHS)) % 3 > 0
    batch = packed(tasks=np.array(tasks, np.uint8), dimensions=dimensions, normalize=normalize)
    outputs = encoder.wait(encoder.submit(batch))
    wanted = expected(jina, batch)
    assert [*outputs] == [Task.EMBED, Task.TOKENS]
    embedding = [i for i, task in enumerate(tasks) if Task.EMBED in task]
    np.testing.assert_allclose(
        outputs[Task.EMBED].values, np.stack([wanted[i].mean(0) for i in embedding]), atol=1e-4
    )  # the stand-in neither cuts nor normalizes
    for_tokens = [i for i, task in enumerate(tasks) if Task.TOKENS in task]
    np.testing.assert_allclose(outputs[Task.TOKENS].values, np.concatenate([wanted[i] for i in for_tokens]), atol=2e-4)
    assert outputs[Task.TOKENS].counts.tolist() == [LENGTHS[i] for i in for_tokens]


def test_two_full_batches_in_flight_and_no_third(model: Model, make: Make) -> None:
    """A third leaves nothing behind in the encoders that had room for a part of it."""
    encoder, gpu = make(model)
    first, second = packed(), packed(LENGTHS[::-1], np.roll(ADAPTERS, 5))
    assert first.tokens == second.tokens == encoder.max_batch_tokens
    alone = [encoder.encode(each) for each in (first, second)]
    tickets = [encoder.submit(each) for each in (first, second)]
    assert [len(each._outputs) for each in gpu.encoders] == [2] * 6
    for third in (packed(), packed([3], [2]), packed([3, 3], [4, -1])):
        with pytest.raises(EncoderError, match="two batches are in flight already"):
            encoder.submit(third)
    for ticket, wanted in zip(tickets, alone, strict=True):
        np.testing.assert_array_equal(encoder.wait(ticket)[Task.EMBED].values, wanted)
    with pytest.raises(EncoderError, match="not in flight"):
        encoder.wait(tickets[0])
    few = encoder.submit(packed([3, 4], [0, 1])), encoder.submit(packed([5, 6], [1, 2]))
    with pytest.raises(EncoderError, match="two batches are in flight already"):
        encoder.submit(packed([3, 4, 5], [0, 1, 2]))  # the first and the third encoder have room
    assert [len(each._outputs) for each in gpu.encoders] == [0, 1, 2, 1, 0, 0]
    for ticket in few:
        encoder.wait(ticket)
    assert encoder.encode(packed()).shape == (12, 64)


@pytest.mark.parametrize(("failure", "error"), [(Refused, EncoderError), (Lost, EncoderLost)])
def test_part_that_cannot_be_submitted(
    model: Model, make: Make, failure: type[Exception], error: type[EncoderError]
) -> None:
    encoder, gpu = make(model)
    wanted = encoder.encode(packed())
    gpu.encoders[3].fails.append(failure("out of memory"))
    with pytest.raises(EncoderError, match=r"^cuda:0 \(A GPU\): out of memory$") as caught:
        encoder.submit(packed())
    assert type(caught.value) is error
    assert not any(each._outputs for each in gpu.encoders)
    np.testing.assert_array_equal(encoder.encode(packed()), wanted)


@pytest.mark.parametrize(
    ("failures", "error"),
    [({1: Refused("a")}, EncoderError), ({1: Refused("a"), 4: Lost("b")}, EncoderLost), ({0: Lost("b")}, EncoderLost)],
)
def test_parts_that_fail_while_they_are_waited_for(
    model: Model, make: Make, failures: dict[int, Exception], error: type[EncoderError]
) -> None:
    """The other parts are taken all the same, and a lost encoder is worse than a failed forward."""
    encoder, gpu = make(model)
    wanted = encoder.encode(packed())
    ticket = encoder.submit(packed())
    wait = StandInEncoder.wait

    def failing(self: StandInEncoder, ticket: int) -> Any:
        outputs = wait(self, ticket)
        if (failure := failures.get(gpu.encoders.index(self))) is not None:
            raise failure
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandInEncoder, "wait", failing)
        with pytest.raises(EncoderError, match=r"cuda:0 \(A GPU\): [ab]") as caught:
            encoder.wait(ticket)
    assert type(caught.value) is error
    assert not any(each._outputs for each in gpu.encoders)
    np.testing.assert_array_equal(encoder.encode(packed()), wanted)


def test_adapters_that_a_model_does_not_have(model: Model, make: Make) -> None:
    encoder, gpu = make(model)
    with pytest.raises(EncoderError, match="the adapter of sequence 1 must be -1 to 4, found 5"):
        encoder.submit(packed([2, 2], [0, 5]))
    with pytest.raises(EncoderError, match="adapters must have one element a sequence, found 3"):
        encoder.submit(packed([2, 2], [0, 1, 1]))
    assert lengths_run(gpu) == [[]] * 6
    encoder.close()
    with pytest.raises(EncoderError, match="the encoder is closed"):
        encoder.submit(packed([2, 2], [0, 1]))


@pytest.mark.parametrize("cu_seqlens", [[0, 2, 9], [1, 2, 4], [0, 4, 4], [0, 5, 4]])
def test_batch_that_makes_no_sense_is_left_whole(cu_seqlens: list[int]) -> None:
    """The extension reports the error."""
    batch = PackedBatch(np.zeros(4, np.int32), np.array(cu_seqlens, np.int32), adapters=np.array([0, 1], np.int8))
    (part,) = parts_of(batch)
    assert part.batch is batch
