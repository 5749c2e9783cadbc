"""Matrices in 8 bits on the host: what the device is asked, what is refused. test_tiles.py has its tiles."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.csrc.host_program import RECORDED, build
from tests.csrc.recorded import HIDDEN, LAYERS, LONG, Launch, names, only

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use

INNER = 1024
GATED_OR_TURNED = "gates, rotary positions, LayerNorms before a layer's parts, narrower embeddings or shared layers"
SIZES = "they must be multiples of 128 of at most 1024 and 8192"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("int8"), Path(__file__).with_name("recorded_int8.cpp"), *RECORDED)


def told(program: Path, *arguments: str) -> list[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout.splitlines()


def forward(program: Path, what: str = "forward") -> list[Launch]:
    lines = [line.partition(" ") for line in told(program, what, *map(str, LONG))]
    return [
        (name, {k: int(v) for k, _, v in (each.partition("=") for each in rest.split())}) for name, _, rest in lines
    ]


def test_a_layer_is_asked_for_what_it_is_in_16_bits(program: Path) -> None:
    """Quantizing rows is a product's own business, so the ops are those of 16 bits."""
    found = forward(program)
    layer = ["linear", "attention", "linear", "linear", "linear"]
    assert found[names(found).index("started")][1] == {"refused": 0}
    assert "row_offsets" in names(found)
    assert names(found)[names(found).index("embedding", names(found).index("started")) + 1 :][: 5 * LAYERS] == (
        layer * LAYERS
    )
    assert only(found, "embedding")[0]["prescaled_rows"] == 0


def test_products_of_layers_have_scales_and_share_memory_for_rows(program: Path) -> None:
    prepared = only(forward(program), "prepare")
    layers, heads = prepared[: 4 * LAYERS], prepared[4 * LAYERS :]
    sizes = [(HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN)]
    assert [(each["in"], each["out"]) for each in layers] == sizes * LAYERS
    assert len({each["scales"] for each in layers} - {-1}) == 4 * LAYERS
    (memory,) = {(each["quantized"], each["quantized_scales"]) for each in layers}
    assert -1 not in memory
    assert all(each["exact"] == -1 and each["prescaled_rows"] == 0 for each in layers)
    # LayerNorms are applied where they are folded in 16 bits: QKV and FFN in to their rows, O and FFN out to residuals.
    assert [each["normed"] == -1 for each in layers] == [False, True, False, True] * LAYERS
    assert [each["residual_normed"] == -1 for each in layers] == [True, False, True, False] * LAYERS
    # Rows that are multiplied have a norm of their own, balanced with the matrix; residuals have the model's.
    of_rows = {each["normed"] for each in layers} - {-1}
    assert len(of_rows) == 2 * LAYERS
    assert not of_rows & {each["residual_normed"] for each in layers}
    assert [each["scales"] for each in heads] == [-1]  # multi-vectors stay in 16 bits


def test_memory_for_rows_holds_the_widest_ones(program: Path) -> None:
    (found,) = {(each["quantized"], each["quantized_scales"]) for each in only(forward(program), "prepare")[:4]}
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
        *((f"kind {kind}", GATED_OR_TURNED) for kind in range(2, 8)),
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
