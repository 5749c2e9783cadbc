"""The launches of heads without a device, and their sequences: recorded.py."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.csrc.recorded import (
    CLASSIFY,
    CLS,
    EMBED,
    HIDDEN,
    HOPPER,
    LAYERS,
    MEAN,
    MULTI,
    SPARSE,
    TOKENS,
    Batch,
    built,
    everything,
    launches,
    names,
    only,
)

ALL = EMBED | TOKENS | CLASSIFY | SPARSE | MULTI
DENSE, LABELS, COLUMNS = 64, 3, 128  # columns of EMBED, CLASSIFY and MULTI: recorded_forwards.cpp
SPLADE, OVERFLOWING, TOKEN_LOGITS = 32, 64, 128  # heads: recorded_forwards.cpp

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("heads"))


def all_of(lengths: list[int], tasks: int) -> Batch:
    return [(length, tasks) for length in lengths]


def test_two_tasks_may_share_the_gathered_rows(program: Path) -> None:
    batch = [(500, EMBED), (400, CLASSIFY), (300, EMBED | CLASSIFY), (20, EMBED), (33, EMBED)]
    found = launches(program, CLS, HOPPER, batch, heads=CLASSIFY)
    assert len(only(found, "gather")) == 1
    embed, classify = only(found, "pool")
    assert embed["gathered"] == classify["gathered"] == 1
    assert (embed["chosen"], embed["first"], embed["last"]) == (4, 0, 4)
    assert (classify["chosen"], classify["first"], classify["last"]) == (2, 1, 2)
    assert (embed["cut"], classify["cut"]) == (1, 0)


def test_outputs_lie_apart(program: Path) -> None:
    found = launches(program, CLS, HOPPER, all_of([3] * 90, ALL), heads=CLASSIFY | SPARSE | MULTI)
    sizes = {
        only(found, "pool")[0]["y"]: 90 * HIDDEN,
        only(found, "dense")[1]["y"]: 90 * LABELS,
        only(found, "token_weights")[0]["y"]: 270,
        only(found, "token_rows")[0]["y"]: 270 * COLUMNS,
    }
    assert len(sizes) == 4
    for (one, size), (other, _) in itertools.pairwise(sorted(sizes.items())):
        assert other - one >= 4 * size
        assert other % 256 == 0
    assert {each["chosen"] for name, each in found if "chosen" in each} == {-1}
    assert names(found).count("copy") == 3  # no lists: the batch, token vectors, the rest


def test_small_batches_of_one_task_are_graphs(program: Path) -> None:
    some: list[Batch] = [
        all_of([20, 3], EMBED), all_of([20, 3], CLASSIFY), [(20, EMBED), (3, CLASSIFY)], all_of([20], EMBED | CLASSIFY),
        all_of([20], SPARSE),
    ]  # fmt: skip
    found = launches(program, CLS, HOPPER, *some, graphs=EMBED | CLASSIFY, heads=CLASSIFY | SPARSE)
    assert found[0] == ("started", {"graphs": 240})
    per_batch = " ".join(names(found)[1:]).split("submitted")
    assert [part.split().count("graph") for part in per_batch] == [1, 1, 0, 0, 0, 0]
    assert launches(program, CLS, HOPPER, graphs=CLASSIFY, heads=CLASSIFY)[0][1] == {"graphs": 120}
    assert launches(program, CLS, HOPPER, graphs=CLASSIFY)[0][1] == {"graphs": 0}  # no such head
    captured = everything(program, MEAN, HOPPER, graphs=CLASSIFY, heads=CLASSIFY)
    logits = {each["y"] for each in only(captured, "dense")[1::2]}
    assert len(logits) <= 4  # two slots' own places: captured, and of the batches at start


def test_at_load_every_head_has_run_and_has_its_memory(program: Path) -> None:
    heads = CLASSIFY | SPARSE | MULTI
    found = everything(program, CLS, HOPPER, all_of([512] * 8, EMBED | heads), all_of([512] * 8, heads), heads=heads)
    start = names(found)[: names(found).index("started")]
    assert {"pool", "dense", "token_weights", "token_rows"} <= set(start)
    assert "allocate" not in names(found)[len(start) :]
    products = only(found, "prepare")
    assert [(each["in"], each["out"]) for each in products[4 * LAYERS :]] == [(HIDDEN, COLUMNS)]
    assert (products[-1]["normed"], products[-1]["exact"]) == (-1, -1)


def test_splade_takes_many_texts_in_groups(program: Path) -> None:
    found = launches(program, CLS, HOPPER, all_of([1] * 1500 + [2] * 700, SPARSE), heads=SPLADE)
    groups = [(each["text"], each["texts"], each["end"]) for each in only(found, "begin_maxima")]
    assert groups == [(0, 1024, 1024), (1024, 1024, 2596), (2048, 152, 2900)]
    assert [(each["row"], each["rows"], each["text"]) for each in only(found, "maxima")] == [
        (0, 1024, 0), (1024, 1572, 1024), (2596, 304, 2048),
    ]  # fmt: skip
    assert [each["goes_on"] for each in only(found, "write_pairs")] == [0, 1, 1]
    assert found[-1][1] == {"rows8": 4400, "columns8": 1}


@pytest.mark.parametrize("others", [0, EMBED])
def test_texts_whose_pairs_do_not_fit_run_again(program: Path, others: int) -> None:
    """There is room for two texts' pairs."""
    batch: Batch = [
        (length, SPARSE | others if i != 3 else EMBED) for i, length in enumerate([20, 33, 15, 500, 70, 40])
    ]
    found = launches(program, CLS, HOPPER, batch, heads=OVERFLOWING)
    runs = [(each["texts"], each["chosen"] >= 0, each["end"]) for each in only(found, "begin_maxima")]
    assert runs == [(5, True, 678), (2, False, 85), (1, False, 40)]
    assert [each["tokens"] for each in only(found, "offsets")] == [678, 85, 40]
    pairs = 5 * ((8 << 20) // 3 + 1)
    assert found[-1][1]["rows8"] == pairs
    assert found[-1][1]["rows1"] == (6 if others else 1)
    assert names(found).count("finished") == 1


def test_splade_has_its_memory_and_has_run_at_load(program: Path) -> None:
    found = everything(program, CLS, HOPPER, all_of([512] * 8, SPARSE), heads=SPLADE)
    start = names(found)[: names(found).index("started")]
    assert {"begin_maxima", "maxima", "count_pairs", "write_pairs"} <= set(start)
    assert "allocate" not in names(found)[len(start) :]
    (prepared,) = only(found, "prepare_maxima")
    assert (prepared["in"], prepared["out"]) == (HIDDEN, 1000)
