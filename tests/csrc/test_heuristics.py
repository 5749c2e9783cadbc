"""The kernel and the tile that GEMMs get fit each other, for every number of rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.csrc.host_program import CSRC, build, output_of

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use

# (rows of W, in, kind, multiprocessors), kind as in heuristics.cpp: with every kernel among the results.
CASES = [
    (384, 1536, 1, 132),
    (2304, 768, 0, 132),
    (1024, 4096, 1, 132),
    (1024, 1024, 4, 132),
    (3072, 1024, 3, 132),
    (6144, 2048, 2, 132),
    (768, 776, 1, 132),  # K is not a multiple of 64
    (768, 3072, 1, 114),
]
TILES = {6: (64, 256), 3: (128, 256), 4: (128, 128), 5: (192, 128), 1: (128, 128), 2: (128, 128)}  # by GemmKernel
SMALL_M = 0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = [Path(__file__).with_name("heuristics.cpp"), CSRC / "gemm" / "heuristics.cpp"]
    return build(tmp_path_factory.mktemp("tiles"), *sources)


def test_the_kernel_fits_its_tile(program: Path) -> None:
    """Cooperative tiles are three kernels: the name of each is that of its tile."""
    told = output_of(program, *(number for case in CASES for number in case)).split()
    kernels = set()
    for at in range(0, len(told), 4):
        _, kernel, tall, wide = map(int, told[at : at + 4])
        kernels.add(kernel)
        assert kernel == SMALL_M or TILES[kernel] == (tall, wide)
    assert kernels == {SMALL_M, *TILES}
