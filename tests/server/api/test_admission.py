"""How many tokens are admitted, by number and by time, and the errors of requests that cannot enter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from embert.server.api.engines.admission import Admission
from embert.server.api.input.request_options import RequestOptions
from embert.server.config import ServeConfig
from embert.server.http.errors import Overloaded, Unavailable
from embert.server.ipc.control import EngineState, ModelInfo
from embert.server.ipc.messages import EngineStatus
from embert.server.ipc.shared_counters import SharedCounters

INFO = ModelInfo("test", "cpu", "a test", "float32", "", 1000, 2, 2, 0.0, 0.1, 0.3)
READY = EngineState(0, "ready", "", "/nonexistent", INFO)


@dataclass
class Engine:
    state: EngineState
    status: EngineStatus | None = None

    @property
    def ready(self) -> bool:
        return self.state.state == "ready"


def admission_of(rates: list[float | None], **options: Any) -> Admission:
    """With ready engines of these rates in tokens/s; None: an engine that has not told its rate yet."""
    engines = {
        index: Engine(READY, None if rate is None else EngineStatus(index, 0.0, 0, rate))
        for index, rate in enumerate(rates)
    }
    admission = Admission(ServeConfig(**options), SharedCounters.create(1, max(1, len(rates))), 0, engines)
    if engines:
        admission.size_queue(INFO.max_batch_tokens)
    return admission


def asks(*, bulk: bool = False, deadline: float = math.inf) -> RequestOptions:
    return RequestOptions(60.0, "--request-timeout", deadline, bulk)


# --- the limit ---


@pytest.mark.parametrize(
    ("rates", "options", "tokens"),
    [
        ([1000.0], {}, 10_000),
        ([1000.0], {"max_queue_seconds": 3.5}, 3500),
        ([1000.0, 2500.0], {}, 35_000),  # engines work side by side
        ([1000.0, None], {}, 10_000),
        ([1000.0], {"max_queue_seconds": 0.0}, 64_000),  # tokens alone
        ([None], {}, 64_000),  # nothing is known of the rate
        ([1e6], {}, 64_000),
        ([1000.0], {"max_queue_tokens": 5000}, 5000),
        ([0.1], {}, 2000),  # two batches, or the engine would wait for work
        ([0.1, 0.1], {"max_queue_seconds": 0.01}, 4000),
        ([0.1], {"max_queue_tokens": 50}, 50),
    ],
)
def test_the_smaller_of_tokens_and_time_holds(rates: list[float | None], options: dict[str, Any], tokens: int) -> None:
    assert admission_of(rates, **options).queue_limit == tokens


# --- one request ---


@pytest.mark.parametrize(
    ("options", "bulk", "limit"),
    [
        ({"max_queue_tokens": 1000}, False, "the limit is 1000 (--max-queue-tokens)"),
        ({"max_queue_tokens": 1000}, True, "(--max-queue-tokens), of which bulk requests may fill 75%"),
        ({"max_queue_seconds": 5.0}, False, "the limit is 5000 (--max-queue-seconds 5 at 1000 tokens/s)"),
    ],
)
def test_a_refusal_names_the_numbers(options: dict[str, Any], bulk: bool, limit: str) -> None:
    admission = admission_of([1000.0], **options)
    admission.check(1_000_000, asks(bulk=bulk))  # alone, a request enters whatever its size
    room = int(admission.queue_limit * (0.75 if bulk else 1.0))
    admission.add(room - 10)
    admission.check(10, asks(bulk=bulk))
    with pytest.raises(Overloaded) as refused:
        admission.check(11, asks(bulk=bulk))
    assert f"the queue holds {room - 10} tokens and this request has 11; " in refused.value.message
    assert limit in refused.value.message
    assert refused.value.retry_after_s == math.ceil((room - 10) / 1000)
    admission.add(10 - room)
    assert admission.admitted_tokens == 0
    admission.check(room + 1, asks(bulk=bulk))


def test_words_are_counted_only_where_the_upper_bound_does_not_fit() -> None:
    admission = admission_of([1000.0], max_queue_tokens=100)
    admission.add(50)
    counted: list[int] = []

    def least() -> int:
        counted.append(40)
        return counted[-1]

    admission.check_room(least, 50, asks())
    assert not counted
    admission.check_room(least, 90, asks())
    assert counted == [40]
    admission.add(20)
    with pytest.raises(Overloaded, match="this request has at least 40; the limit is 100"):
        admission.check_room(least, 90, asks())
    with pytest.raises(Overloaded, match="this request has 40; the limit is 100"):
        admission.check_room(least, 40, asks())


def test_a_server_that_takes_nothing_answers_503() -> None:
    admission = admission_of([])
    with pytest.raises(Unavailable, match=r"the engine is not ready \(starting\)") as refused:
        admission.check(1, asks())
    assert (refused.value.retry_after_s, refused.value.reason) == (2, "loading")
    admission = admission_of([1000.0])
    with pytest.raises(Unavailable, match=r"was not answered within 60 s \(--request-timeout\)") as refused:
        admission.check(1, asks(deadline=0.0))
    assert refused.value.reason == "deadline"
    admission.draining = True
    with pytest.raises(Unavailable, match="the server is shutting down") as refused:
        admission.check(1, asks())
    assert (refused.value.retry_after_s, refused.value.reason) == (1, "draining")
    admission.check_room(lambda: 1, 1, asks())  # which leaves it to `check`


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        (["ready"], "connecting"),
        (["loading", "down"], "loading: weights; down: weights"),
    ],
)
def test_the_reason_names_the_engines_states(states: list[str], reason: str) -> None:
    engines = {
        index: Engine(EngineState(index, state, "" if state == "ready" else "weights"))
        for index, state in reversed(list(enumerate(states)))
    }
    admission = Admission(ServeConfig(), SharedCounters.create(1, len(states)), 0, engines)
    assert admission.unready_reason() == f"the engine is not ready ({reason})"
