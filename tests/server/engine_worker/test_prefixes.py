"""Requests whose texts have a prefix in common: a batch counts it once, and has it once."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest

from embert.engine import load_model
from embert.engine.models.flops import TokenCounts
from embert.server.engine_worker.batches import batch_of, pack, pair_lengths
from embert.server.engine_worker.lanes import Request, Slice
from embert.server.engine_worker.scheduler import Batch, Scheduler
from tests.server.engine_worker.schedulers import next_batch, scheduler_of


def request(key: str, prefix: int, own: list[int], **more: object) -> Request:
    return Request(key, [prefix + tokens for tokens in own], prefix=prefix, **more)  # type: ignore[arg-type]


def drained(scheduler: Scheduler) -> list[Batch]:
    batches = []
    while scheduler.queue_texts:
        batches.append(next_batch(scheduler))
    assert scheduler.queue_tokens == 0
    assert scheduler.next_batch() is None
    return batches


def test_a_batch_counts_a_prefix_once() -> None:
    scheduler = scheduler_of(2048)
    scheduler.add(request("questions", 800, [40] * 20))
    assert scheduler.queue_tokens == 1600
    (batch,) = drained(scheduler)
    assert (batch.tokens, batch.counted, batch.texts) == (1600, 1600, 20)
    assert batch_of(None, batch.slices).counted == 1600


@pytest.mark.parametrize(("queries", "lengths"), [(1, [8192, 8192]), (1, [600, 8192, 20]), (2, [700, 900, 20, 8192])])
def test_a_query_and_a_document_do_not_attend_to_each_other(queries: int, lengths: list[int]) -> None:
    counts = TokenCounts(load_model().config)
    scheduler = scheduler_of(2048, longest_text=20_000, counts=counts)
    prefix, pairs, firsts = pair_lengths(lengths, queries)
    scheduler.add(Request("pairs", pairs, prefix=prefix, queries=firsts))
    assert scheduler.queue_tokens == sum(counts.of(lengths))


@pytest.mark.parametrize("others", [0, 1, 5])
@pytest.mark.parametrize(("prefix", "own"), [(60, 100), (800, 40), (1900, 40), (5000, 30)])
def test_a_request_costs_at_most_twice_its_tokens(prefix: int, own: int, others: int) -> None:
    """Also next to others, with which it shares batches: each of its batches repeats its prefix."""
    counts = TokenCounts(load_model().config) if prefix == 5000 else None
    scheduler, texts = scheduler_of(2048, longest_text=16_384, counts=counts), 200
    scheduler.add(request("one", prefix, [own] * texts))
    tokens = scheduler.queue_tokens
    for other in range(others):
        scheduler.add(Request(other, [100] * 100))
    batches = drained(scheduler)
    slices = [piece for batch in batches for piece in batch.slices if piece.request.key == "one"]
    assert [piece.start for piece in slices] == [0, *(piece.stop for piece in slices[:-1])]
    assert slices[-1].stop == texts
    counted = sum(batch_of(None, [piece]).counted for piece in slices)
    assert counted <= 2 * tokens
    assert all(batch.tokens == sum(piece.tokens for piece in batch.slices) for batch in batches)


def test_every_text_runs_once_next_to_any_requests() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        scheduler, texts = scheduler_of(256, longest_text=1024), 0
        for key in range(random.integers(1, 12)):
            own = random.integers(1, 60, random.integers(1, 30)).tolist()
            prefix = int(random.integers(0, 3) * random.integers(1, 300)) if len(own) > 1 else 0
            scheduler.add(request(str(key), prefix, own, low_priority=bool(random.integers(2))))
            texts += len(own)
            if random.integers(3) == 0 and scheduler.queue_texts:
                texts -= next_batch(scheduler).texts
            if random.integers(5) == 0:
                texts -= scheduler.cancel(str(random.integers(key + 1)))
        batches = drained(scheduler)
        assert sum(batch.texts for batch in batches) == texts
        for batch in batches:
            assert batch.tokens == sum(piece.tokens for piece in batch.slices) <= 1024
            assert batch.counted == batch_of(None, batch.slices).counted


def test_a_packed_batch_has_a_prefix_once() -> None:
    random = np.random.default_rng(0)
    slices: list[Slice] = []
    texts: list[npt.NDArray[np.int32]] = []
    for prefix, own in ((0, [3]), (20, [1, 5, 2, 9]), (0, [4, 4]), (7, [2, 2])):
        head = random.integers(0, 100, prefix)
        ids = [np.concatenate([head, random.integers(0, 100, tokens)]).astype(np.int32) for tokens in own]
        message = SimpleNamespace(
            ids=np.concatenate(ids).tobytes(),
            token_types=b"",
            dimensions=0,
            normalize=True,
            tasks=1,
            adapter=-1,
            queries=0,
            prompt_tokens=0,
        )
        start = len(own) // 3
        slices.append(request("", prefix, own, message=message).piece(start, len(own)))
        texts += ids[start:]
    batch = pack(slices)
    assert batch.tokens == sum(piece.tokens for piece in slices)
    assert batch.prefixes is not None
    for number, (owner, prefix) in enumerate(batch.prefixes):
        tail, whole = (batch.ids[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]] for i in (number, owner))
        np.testing.assert_array_equal(np.concatenate([whole[:prefix], tail]), texts[number])
