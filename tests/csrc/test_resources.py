"""What ptxas gives the Hopper kernels: barriers and serialized products, which cost time and change no result.

Needs nvcc, no GPU; compiles only what the install has not. Each rule stands for something that happened: a barrier's
number in a register counted as all 16 and kept attention to four blocks a multiprocessor (passages 54 µs a layer
instead of 46); a product too many in flight for the registers makes the compiler wait for each (C7512).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.csrc.host_program import CSRC

pytestmark = pytest.mark.timeout(900)  # four compilers at once, on cores that others may use

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
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    if "compute_90" not in known:
        pytest.skip(f"{nvcc} does not know sm_90")
    options = [
        "-O3",
        "-std=c++17",
        f"-gencode=arch=compute_90a,code={ARCHITECTURE}",
        "-Xptxas=-v",
        f"-I{CSRC}",
        "-o",
        "/dev/null",
    ]
    told = words_of_install()
    if told is None:
        kept = place_of_words(nvcc, options)
        if not kept.is_file():
            keep(kept, words(nvcc, options))
        told = json.loads(kept.read_text())
    return {Path(source).stem: parsed(said) for source, said in told.items()}


def words_of_install() -> dict[str, str] | None:
    """What ptxas said when embert was installed with these sources (csrc/keep_ptxas_output.sh); None if it was not."""
    objects = {source: f"csrc/CMakeFiles/embert_cuda.dir/{source}.o" for source in SOURCES}
    ninja = shutil.which(Path(sys.executable).with_name("ninja")) or shutil.which("ninja")
    for build in (CSRC.parent / "build").glob("*/build.ninja") if ninja else ():
        kept = {source: build.parent / f"{made}.words" for source, made in objects.items()}
        if all(path.is_file() and ARCHITECTURE in path.read_text() for path in kept.values()):
            asked = [str(ninja), "-C", str(build.parent), "-n", *objects.values()]
            if "no work to do" in subprocess.run(asked, capture_output=True, text=True, check=False).stdout:
                return {source: path.read_text() for source, path in kept.items()}
    return None


def words(nvcc: str, options: Sequence[str]) -> dict[str, str]:
    """What ptxas says of each source."""
    running = {
        source: subprocess.Popen(
            [nvcc, *options, "-cubin", CSRC / source], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for source in SOURCES
    }
    told = {source: process.communicate()[1] for source, process in running.items()}
    for source, process in running.items():
        assert process.returncode == 0, told[source]
    return told


def place_of_words(nvcc: str, options: Sequence[str]) -> Path:
    """Where they are kept from run to run, for these sources and this compiler: they cost a minute of a core."""
    version = subprocess.run([nvcc, "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(repr((version, options, SOURCES)).encode())
    for path in sorted(path for path in CSRC.rglob("*") if path.is_file()):
        key.update(bytes(path.relative_to(CSRC)) + hashlib.sha256(path.read_bytes()).digest())
    return CSRC.parent / "build" / f"ptxas-{key.hexdigest()[:16]}.json"


def keep(place: Path, told: dict[str, str]) -> None:
    """Whole or not at all, instead of what older sources left."""
    place.parent.mkdir(exist_ok=True)
    for old in place.parent.glob("ptxas-*.json"):
        old.unlink(missing_ok=True)
    written = place.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(told))
    written.rename(place)


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
    """As many blocks as the registers allow: 65 536 of a multiprocessor, 128 threads a block."""
    chosen = [each for each in compiled[source].kernels if f"{kernel}_kernel" in each.name]
    assert chosen
    for each in chosen:
        blocks = min(16, 65_536 // (128 * -(-each.registers // 8) * 8))
        assert each.barriers * blocks <= BARRIERS, each


def test_two_blocks_of_long_texts_share_a_multiprocessor(compiled: dict[str, Compiled]) -> None:
    for each in compiled["long_texts"].kernels:
        assert 2 * 256 * (-(-each.registers // 8) * 8) <= 65_536
        assert 2 * each.barriers <= BARRIERS
