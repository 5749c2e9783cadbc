"""Resources that ptxas gives the Hopper kernels: barriers and serialized products, which cost time, but no result.

Needs an install for sm_90a, no GPU. Each rule stands for something that happened: a barrier's number in a register
counted as all 16 and kept attention to four blocks a multiprocessor (passages 54 µs a layer instead of 46); a product
too many in flight for the registers makes the compiler wait for each (C7512).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.csrc.host_program import CSRC

SOURCES = (
    "gemm/kernels/sm90_linear.cu",
    "gemm/kernels/sm90_feed_forward.cu",
    "gemm/kernels/sm90_fused.cu",
    "gemm/kernels/sm90_int8.cu",
    "gemm/kernels/sm90_maxima.cu",
    "attention/sm90/long_texts.cu",
    "attention/sm90/sm90.cu",
    "attention/sm80.cu",
    "ops/quantize.cu",
)
ARCHITECTURE = "sm_90a"
BARRIERS = 64  # of a multiprocessor


@dataclass(frozen=True)
class Kernel:
    name: str  # mangled
    registers: int
    barriers: int


@dataclass(frozen=True)
class Compiled:
    kernels: list[Kernel]
    serialized: list[str]  # C75xx: ptxas says that it waits for each wgmma


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    """The output of ptxas when these sources were installed (csrc/keep_ptxas_output.sh)."""
    objects = {source: f"csrc/CMakeFiles/embert_cuda.dir/{source}.o" for source in SOURCES}
    ninja = shutil.which(Path(sys.executable).with_name("ninja")) or shutil.which("ninja")
    for build in (CSRC.parent / "build").glob("*/build.ninja") if ninja else ():
        outputs = {source: build.parent / f"{name}.words" for source, name in objects.items()}
        if not all(path.is_file() and ARCHITECTURE in path.read_text() for path in outputs.values()):
            continue
        command = [str(ninja), "-C", str(build.parent), "-n", *objects.values()]
        if "no work to do" in subprocess.run(command, capture_output=True, text=True, check=False).stdout:
            return {Path(source).stem: parsed(path.read_text()) for source, path in outputs.items()}
    pytest.skip("needs an install of these sources for sm_90a")


def parsed(said: str) -> Compiled:
    pattern = re.compile(
        rf"Compiling entry function '(?P<name>\w+)' for '{ARCHITECTURE}'.*?"
        r"Used (?P<registers>\d+) registers(?:, used (?P<barriers>\d+) barriers)?",
        re.DOTALL,
    )
    kernels = [
        Kernel(found["name"], int(found["registers"]), int(found["barriers"] or 0)) for found in pattern.finditer(said)
    ]
    return Compiled(kernels, [line for line in said.splitlines() if re.search(r"\(C75\d\d\)", line)])


def test_wgmma_is_not_serialized(compiled: dict[str, Compiled]) -> None:
    for source, each in compiled.items():
        assert each.kernels, source
        assert not each.serialized, source


@pytest.mark.parametrize(
    ("source", "kernel"),
    [("sm90", "attention_sm90"), ("sm90", "attention_sm90_window"), ("sm80", "attention_sm80_short")],
)
def test_barriers_do_not_limit_blocks(compiled: dict[str, Compiled], source: str, kernel: str) -> None:
    """Barriers allow the blocks that the registers allow: 65 536 of a multiprocessor, 128 threads a block."""
    chosen = [each for each in compiled[source].kernels if f"{kernel}_kernel" in each.name]
    assert chosen
    for each in chosen:
        blocks = min(16, 65_536 // (128 * -(-each.registers // 8) * 8))
        assert each.barriers * blocks <= BARRIERS, each


def test_two_blocks_of_long_texts_share_a_multiprocessor(compiled: dict[str, Compiled]) -> None:
    for each in compiled["long_texts"].kernels:
        assert 2 * 256 * (-(-each.registers // 8) * 8) <= 65_536
        assert 2 * each.barriers <= BARRIERS
