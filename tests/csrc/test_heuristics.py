"""Which kernel and tile the GEMMs of some models get, for every number of rows: a choice that was measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.csrc.host_program import CSRC, build

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use

KERNELS = ["small M", "ping-pong", "shared", *["cooperative"] * 3, "ping-pong"]  # GemmKernel

# By GEMM: (rows of W, in, kind, multiprocessors), kind as in heuristics.cpp, and from which number of rows on
# which kernel and tile it gets.
CASES: dict[str, tuple[tuple[int, int, int, int], str]] = {
    "MiniLM FFN out": (
        (384, 1536, 1, 132),
        "1: small M 16x32, 33: small M 32x32, 97: small M 64x32, 129: small M 64x64, 1665: cooperative 128x128, "
        "5633: cooperative 192x128, 8449: cooperative 128x128, 11265: cooperative 128x256, "
        "12545: cooperative 128x128, 22529: cooperative 192x128, 25345: cooperative 128x128, "
        "28161: cooperative 192x128",
    ),
    "BERT-base QKV": (
        (2304, 768, 0, 132),
        "1: small M 16x32, 17: small M 32x32, 33: small M 64x32, 65: small M 64x64, 385: shared 128x128, "
        "897: ping-pong 128x128",
    ),
    "BERT-base O": (
        (768, 768, 1, 132),
        "1: small M 16x32, 17: small M 32x32, 97: small M 64x32, 129: small M 64x64, 833: cooperative 128x128, "
        "2817: cooperative 192x128, 4225: cooperative 128x256, 5633: cooperative 128x128, "
        "8449: cooperative 128x256, 11265: cooperative 192x128, 12673: cooperative 128x256",
    ),
    "BERT-base FFN in": (
        (3072, 768, 0, 132),
        "1: small M 16x32, 17: small M 32x32, 33: small M 64x32, 65: small M 64x64, 321: shared 128x128, "
        "641: ping-pong 128x128",
    ),
    "BERT-base FFN out": (
        (768, 3072, 1, 132),
        "1: small M 16x32, 17: small M 32x32, 97: small M 64x32, 129: small M 64x64, 833: cooperative 128x128, "
        "2817: cooperative 192x128, 4225: cooperative 128x256, 11265: cooperative 192x128, "
        "12673: cooperative 128x256",
    ),
    "BERT-large FFN out": (
        (1024, 4096, 1, 132),
        "1: small M 16x32, 33: small M 32x32, 97: small M 64x32, 129: small M 64x64, 641: cooperative 128x128, "
        "2049: cooperative 192x128, 3073: cooperative 128x256, 8449: cooperative 192x128, "
        "9217: cooperative 128x256, 12545: cooperative 192x128, 12673: cooperative 128x256",
    ),
    "BERT-large O in int8": (
        (1024, 1024, 4, 132),
        "1: small M 16x32, 33: small M 32x32, 97: small M 64x32, 641: cooperative 128x128, "
        "2049: cooperative 192x128, 3073: cooperative 128x128, 6145: ping-pong 64x256, 8449: cooperative 192x128, "
        "9217: ping-pong 64x256, 12545: cooperative 192x128, 12673: ping-pong 64x256",
    ),
    "BERT-large FFN out in int8": (
        (1024, 4096, 4, 132),
        "1: small M 16x32, 33: small M 32x32, 97: small M 64x32, 641: cooperative 128x128, "
        "2049: cooperative 192x128, 3073: cooperative 128x256, 8449: cooperative 192x128, "
        "9217: cooperative 128x256, 12545: cooperative 192x128, 12673: cooperative 128x256",
    ),
    "BERT-large QKV in int8": (
        (3072, 1024, 3, 132),
        "1: small M 16x64, 17: small M 32x64, 33: small M 64x32, 65: small M 64x64, 321: shared 128x128, "
        "641: ping-pong 128x128",
    ),
    "long K without a residual": (
        (6144, 2048, 0, 132),
        "1: small M 16x64, 17: small M 32x64, 33: small M 64x32, 65: small M 64x64, 129: shared 128x128, "
        "257: cooperative 128x256",
    ),
    "ModernBERT-large's gates": (
        (5248, 1024, 2, 132),
        "1: small M 16x64, 17: small M 32x32, 33: small M 64x32, 65: small M 64x64, 129: shared 128x128, "
        "385: ping-pong 128x128",
    ),
    "long K, RoPE or gated": (
        (6144, 2048, 2, 132),
        "1: small M 16x64, 17: small M 32x64, 33: small M 64x32, 65: small M 64x64, 129: shared 128x128, "
        "257: ping-pong 128x128",
    ),
    "K no multiple of 64": (
        (768, 776, 1, 132),
        "1: cooperative 128x128, 2817: cooperative 192x128, 4225: cooperative 128x256, "
        "11265: cooperative 192x128, 12673: cooperative 128x256",
    ),
    "BERT-base FFN out, 114 multiprocessors": (
        (768, 3072, 1, 114),
        "1: small M 16x32, 17: small M 32x32, 97: small M 64x32, 129: small M 64x64, 833: cooperative 128x128, "
        "2305: cooperative 192x128, 3457: cooperative 128x256, 7169: cooperative 192x128, "
        "7297: cooperative 128x256, 9729: cooperative 192x128, 10753: cooperative 128x256, "
        "21761: cooperative 192x128, 21889: cooperative 128x256",
    ),
}

# (tile rows, tiles across, clusters): whole rows of tiles, cycles a step.
NARROWING = {
    (1, 1, 66): (0, 630),
    (7, 3, 66): (0, 630),
    (22, 6, 66): (22, 2160),  # whole rounds
    (45, 3, 57): (38, 2790),
    (50, 4, 66): (49, 3870),
    (66, 1, 66): (66, 1080),
    (103, 4, 66): (99, 7110),  # 26 361 rows of 1 024 columns
    (104, 3, 66): (104, 5400),  # the rest does not fit one round of narrow tiles
    (206, 4, 66): (198, 13590),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = [Path(__file__).with_name("heuristics.cpp"), CSRC / "gemm" / "heuristics.cpp"]
    return build(tmp_path_factory.mktemp("tiles"), *sources)


def answered(program: Path, *arguments: object) -> str:
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def test_gemms_get_the_tiles_that_were_measured(program: Path) -> None:
    told = answered(program, *(number for case, _ in CASES.values() for number in case)).split("\n\n")
    for (name, (_, wanted)), lines in zip(CASES.items(), told, strict=False):
        found = [tuple(map(int, line.split())) for line in lines.splitlines()]
        assert ", ".join(f"{rows}: {KERNELS[kernel]} {tall}x{wide}" for rows, kernel, tall, wide in found) == wanted, (
            name
        )


def test_the_kernel_fits_its_tile(program: Path) -> None:
    """Cooperative tiles are three kernels: the name of each is that of its tile."""
    kernels = {6: (64, 256), 3: (128, 256), 4: (128, 128), 5: (192, 128), 1: (128, 128), 2: (128, 128)}
    told = answered(program, *(number for case, _ in CASES.values() for number in case)).split()
    seen = set()
    for at in range(0, len(told), 4):
        _, kernel, tall, wide = map(int, told[at : at + 4])
        if kernel != 0:
            assert kernels[kernel] == (tall, wide)
        seen.add(kernel)
    assert seen == set(range(len(KERNELS)))


def test_last_rows_get_narrow_tiles_where_that_saves_a_round(program: Path) -> None:
    told = answered(program, "narrowing", *(number for case in NARROWING for number in case)).splitlines()
    assert {case: tuple(map(int, line.split())) for case, line in zip(NARROWING, told, strict=True)} == NARROWING
