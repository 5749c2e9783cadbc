"""Matrices in 8 bits on the host: what the device is asked, what is refused. test_tiles.py has its tiles."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.csrc.host_program import RECORDED, build

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use

LAYERS, INNER = 3, 1024
GATED_OR_ROPE = "gates, rotary positions, LayerNorms before a layer's parts, narrower embeddings or shared layers"
SIZES = "they must be multiples of 128 of at most 1024 and 8192"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("int8"), Path(__file__).with_name("recorded_int8.cpp"), *RECORDED)


def told(program: Path, *arguments: str) -> list[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout.splitlines()


def prepared(program: Path) -> list[dict[str, int]]:
    """Arguments of the calls that prepare products, for a batch of texts of 500 tokens and fewer."""
    lines = [line.split() for line in told(program, "forward", "500", "400", "300", "20", "33")]
    return [
        {key: int(value) for key, value in (pair.split("=") for pair in pairs)}
        for name, *pairs in lines
        if name == "prepare"
    ]


def test_matrices_of_layers_are_int8_and_those_of_heads_are_not(program: Path) -> None:
    """test_computed_forwards.py compares what comes out of such layers."""
    assert [each["scales"] == -1 for each in prepared(program)] == [False] * 4 * LAYERS + [True]


def test_memory_for_rows_holds_the_widest_ones(program: Path) -> None:
    (found,) = {(each["quantized"], each["quantized_scales"]) for each in prepared(program)[:4]}
    assert found[1] - found[0] == 4096 * INNER


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("ampere", "int8 needs a GPU of compute capability 9.0"),
        ("portable", "which cuda-portable does not use"),
        ("separate", "need LayerNorms in their products, and hopper was asked for without"),
        ("bfloat16", "matrices in int8 with rows in another type than float16"),
        ("hidden 192", f"hidden size 192 and intermediate size 1024 in int8: {SIZES}"),
        ("hidden 1280", f"hidden size 1280 and intermediate size 1024 in int8: {SIZES}"),
        ("inner 1000", f"hidden size 256 and intermediate size 1000 in int8: {SIZES}"),
        ("inner 8320", f"hidden size 256 and intermediate size 8320 in int8: {SIZES}"),
        *((f"kind {kind}", GATED_OR_ROPE) for kind in range(2, 8)),
        ("float16 matrix", "query.weight of layer 0 must be in int8"),
        ("int8 vector", "out.gamma of layer 0 is in int8"),
        ("no scale", "inner.scale of layer 0 was not loaded"),
        ("no norm", "query.gamma of layer 0 was not loaded"),
    ],
)
def test_what_is_refused(program: Path, what: str, said: str) -> None:
    (line,) = [line for line in told(program, what) if line.startswith(("refused", "fine"))]
    assert line.startswith("refused")
    assert said in line


def test_what_is_not_refused(program: Path) -> None:
    assert told(program, "kind 1")[-1] == "fine"
