"""The host's decisions for a batch: attention's work, which rows the last layer processes, and the graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.csrc.host_program import CSRC, build, output_of

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use

CLS, MEAN, MAX, LAST = range(4)
EMBED, TOKENS, CLASSIFY, SPARSE, MULTI = (1 << bit for bit in range(5))
LABEL_MASS = 1 << 7
LONG = [500, 400, 300, 20, 33]
ALL_ROWS = NO_GRAPH = -1


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = [CSRC / "encoder" / f"{name}.cpp" for name in ("plan", "result")]
    return build(tmp_path_factory.mktemp("plans"), Path(__file__).with_name("plans.cpp"), *sources)


def plan(program: Path, pooling: int, lengths: list[int], task: int) -> list[int]:
    batch = [number for length in lengths for number in (length, task)]
    return [int(number) for number in output_of(program, pooling, *batch).split()]


def test_attention_work_follows_from_the_lengths(program: Path) -> None:
    # 500, 400 and 300 tokens are 8, 7 and 5 tiles of 64 queries; 20 and 32 are short, 33 is one tile.
    assert plan(program, MEAN, [500, 400, 300, 20, 32, 33], EMBED)[:4] == [1285, 6, 21, 2]


@pytest.mark.parametrize(
    ("pooling", "lengths", "task", "row"),
    [
        (CLS, LONG, EMBED, CLS),
        (LAST, LONG, EMBED, LAST),
        (LAST, LONG, CLASSIFY, CLS),
        (CLS, LONG, EMBED | CLASSIFY, CLS),
        (MEAN, LONG, EMBED, ALL_ROWS),
        (MAX, LONG, EMBED, ALL_ROWS),
        (LAST, LONG, EMBED | LABEL_MASS, LAST),
        (CLS, [100, 27], EMBED, ALL_ROWS),  # too few rows
        (CLS, [1] * 200, EMBED, ALL_ROWS),  # no fewer rows
        (CLS, LONG, TOKENS, ALL_ROWS),
        (CLS, LONG, EMBED | SPARSE, ALL_ROWS),
        (CLS, LONG, CLASSIFY | MULTI, ALL_ROWS),
        (MEAN, LONG, EMBED | CLASSIFY, ALL_ROWS),
        (LAST, LONG, EMBED | CLASSIFY, ALL_ROWS),  # they read different rows
    ],
)
def test_rows_are_gathered_where_all_heads_read_the_same_one(
    program: Path, pooling: int, lengths: list[int], task: int, row: int
) -> None:
    assert plan(program, pooling, lengths, task)[4] == row


@pytest.mark.parametrize(
    ("lengths", "task", "graph"),
    [
        ([20, 3], EMBED, [0, 32, 8]),
        ([512, 512], CLASSIFY, [2, 1024, 8]),
        ([16], EMBED, [0, 16, 1]),
        ([512, 512, 1], EMBED, [NO_GRAPH]),  # too many tokens
        ([1] * 65, EMBED, [NO_GRAPH]),  # too many sequences
        ([20], EMBED | CLASSIFY, [NO_GRAPH]),
        ([20], EMBED | LABEL_MASS, [NO_GRAPH]),
        ([20], SPARSE, [NO_GRAPH]),
    ],
)
def test_a_small_batch_of_one_task_has_a_graph(program: Path, lengths: list[int], task: int, graph: list[int]) -> None:
    assert plan(program, MEAN, lengths, task)[5:] == graph
