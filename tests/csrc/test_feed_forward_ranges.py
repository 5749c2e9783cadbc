"""The feed-forward kernel's tiles on clusters: every chunk once, in order, and no cluster waits for a later one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.csrc.host_program import build, output_of

Run = tuple[int, int, int, int]  # cluster, tile, from, to

CASES = [
    *itertools.product(range(1, 12), (1, 2, 3, 24), range(1, 12)),
    *itertools.product((66, 67, 100, 103, 131, 132, 133, 157, 16_384), (1, 2, 15, 24, 48), (57, 66)),
]  # tiles, chunks, clusters


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, int], list[Run]]:
    program = build(tmp_path_factory.mktemp("ranges"), Path(__file__).with_name("feed_forward_ranges.cpp"))
    cases = [(tiles, chunks, min(tiles, clusters)) for tiles, chunks, clusters in CASES]
    parts = output_of(program, *itertools.chain(*cases)).split("\n\n")
    return {
        case: [tuple(map(int, line.split())) for line in part.splitlines()]  # type: ignore[misc]
        for case, part in zip(cases, parts, strict=False)
    }


def test_every_chunk_is_done_once_by_as_even_shares_as_there_are(shares: dict[tuple[int, int, int], list[Run]]) -> None:
    for (tiles, chunks, clusters), runs in shares.items():
        done = sorted((tile, chunk) for _, tile, first, to in runs for chunk in range(first, to))
        assert done == list(itertools.product(range(tiles), range(chunks)))
        work = [sum(to - first for owner, _, first, to in runs if owner == cluster) for cluster in range(clusters)]
        assert max(work) - min(work) <= 1
        assert min(work) >= chunks


def test_a_tile_goes_from_one_cluster_to_the_next_which_does_its_end_last(
    shares: dict[tuple[int, int, int], list[Run]],
) -> None:
    for (_, chunks, clusters), runs in shares.items():
        by_cluster = [[run for run in runs if run[0] == cluster] for cluster in range(clusters)]
        for cluster, own in enumerate(by_cluster):
            for place, (_, tile, first, to) in enumerate(own):
                assert 0 <= first < to <= chunks
                if to < chunks:  # left behind: before anything else, and for the next
                    assert place == 0
                    assert by_cluster[cluster + 1][-1] == (cluster + 1, tile, to, chunks)
                if first > 0:  # taken over: after everything else, from the one before
                    assert place == len(own) - 1
                    assert by_cluster[cluster - 1][0] == (cluster - 1, tile, 0, first)
