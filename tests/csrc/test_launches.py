"""The calls that the encoder makes to a device, without one: recorded.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.csrc.recorded import (
    CLS,
    HOPPER,
    LAYERS,
    LONG,
    MEAN,
    built,
    everything,
    launches,
    names,
    only,
)

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("launches"))


def test_the_only_copies_are_the_batch_and_large_outputs(program: Path) -> None:
    assert names(launches(program, MEAN, HOPPER, LONG)).count("copy") == 1
    assert (
        names(launches(program, MEAN, HOPPER, [1] * 100)).count("copy") == 2
    )  # too many outputs to be written in place
    found = launches(program, MEAN, HOPPER, LONG, [300], LONG)
    assert not {"allocate", "synchronize"} & set(names(found)[1:])


def test_at_load_every_row_before_a_layernorm_is_looked_at_once(program: Path) -> None:
    found = everything(program, CLS, HOPPER, [20])
    start = found[: names(found).index("started")]
    assert [each["rows"] for each in only(start, "row_offsets")] == [4096] * (1 + 2 * LAYERS)
    assert len(only(start, "gather")) == 1  # in the second batch, so that its kernel is loaded


def test_small_batches_are_one_graph(program: Path) -> None:
    found = launches(program, MEAN, HOPPER, [20], [100, 27], [512], [500, 508, 500], [1] * 65, graphs=True)
    assert found[0] == ("started", {"graphs": 120})
    per_batch = " ".join(names(found)[1:]).split("submitted")
    assert [part.split().count("graph") for part in per_batch] == [1, 1, 1, 0, 0, 0]
    assert [part.split().count("pool") for part in per_batch] == [0, 0, 0, 1, 1, 0]


def test_two_batches_are_in_flight_in_slots_of_their_own(program: Path) -> None:
    found = launches(program, MEAN, HOPPER, LONG, [300], LONG, [40, 400])
    tickets = [each["ticket"] for each in only(found, "submitted")]
    assert len(set(tickets)) == 4
    outputs = [each["y"] for each in only(found, "pool")]
    assert outputs[0] != outputs[1]
    assert outputs[2:] == outputs[:2]
