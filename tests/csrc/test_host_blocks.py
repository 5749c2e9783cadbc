"""Memory of results on the host: which blocks are used again, and that none is written past its end or leaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.csrc.host_program import build, output_of

MIB = 1024  # in KiB


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("host_blocks.cpp")
    return build(tmp_path_factory.mktemp("program"), source, flags=["-fsanitize=address,undefined"])


@pytest.mark.parametrize(
    ("asked", "blocks"),
    [
        ([f"+{8 * MIB}", "-0", f"+{8 * MIB}"], [0, 0]),
        ([f"+{8 * MIB}", "-0", f"+{6 * MIB}", "-1", f"+{8 * MIB}"], [0, 0, 0]),
        # Two that are out at once are two; both come back.
        ([f"+{8 * MIB}", f"+{8 * MIB}", "-1", "-0", f"+{8 * MIB}", f"+{8 * MIB}"], [0, 1, 1, 0]),
        # What wants a small part of it leaves a large block where it is.
        ([f"+{64 * MIB}", "-0", f"+{2 * MIB}", f"+{64 * MIB}"], [0, 1, 0]),
        # The two largest are kept.
        (
            [f"+{4 * MIB}", f"+{32 * MIB}", f"+{16 * MIB}", "-0", "-1", "-2", f"+{32 * MIB}", f"+{16 * MIB}"],
            [0, 1, 2, 1, 2],
        ),
    ],
)  # fmt: skip
def test_large_blocks_are_used_again(program: Path, asked: list[str], blocks: list[int]) -> None:
    assert [int(number) for number in output_of(program, *asked).split()] == blocks


@pytest.mark.parametrize("kib", [0, 1, 1023, MIB, 3 * MIB])
def test_a_block_outlives_what_it_is_from(program: Path, kib: int) -> None:
    """The sanitizer ends the program where memory is freed twice, used after that, or never freed."""
    output_of(program, f"+{kib}", f"+{kib}", "-0", "x", "-1")
