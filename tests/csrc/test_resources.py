"""Products of Hopper's kernels that ptxas serializes (C75xx), because too many in flight do not fit the registers.

They cost time, but no result. Needs an optimized install for sm_90a, no GPU; wheels are not built with one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.csrc.host_program import CSRC

SOURCES = (
    "gemm/kernels/sm90_linear.cu",
    "gemm/kernels/sm90_feed_forward.cu",
    "gemm/kernels/sm90_fused.cu",
    "gemm/kernels/sm90_int8.cu",
    "gemm/kernels/sm90_maxima.cu",
    "attention/sm90/decoder.cu",
    "attention/sm90/sm90.cu",
)
ARCHITECTURE = "sm_90a"


def test_wgmma_is_not_serialized() -> None:
    """Reads the output of ptxas when these sources were installed (csrc/keep_ptxas_output.sh)."""
    objects = {source: f"csrc/CMakeFiles/embert_cuda.dir/{source}.o" for source in SOURCES}
    ninja = shutil.which(Path(sys.executable).with_name("ninja")) or shutil.which("ninja")
    for build in (CSRC.parent / "build").glob("*/build.ninja") if ninja else ():
        outputs = [build.parent / f"{name}.words" for name in objects.values()]
        if not all(path.is_file() and ARCHITECTURE in path.read_text() for path in outputs):
            continue
        command = [str(ninja), "-C", str(build.parent), "-n", *objects.values()]
        if "no work to do" in subprocess.run(command, capture_output=True, text=True, check=False).stdout:
            break
    else:
        pytest.skip("needs an optimized install of these sources for sm_90a")
    for path in outputs:
        told = path.read_text()
        assert f"' for '{ARCHITECTURE}'" in told, path.name
        assert not re.findall(r".*\(C75\d\d\).*", told), path.name


@pytest.mark.parametrize(("number", "variable", "status"), [("C7510", "1", 1), ("C7510", "", 0), ("C4510", "1", 0)])
def test_wheels_are_not_built_with_serialized_products(tmp_path: Path, number: str, variable: str, status: int) -> None:
    compiler = ("sh", "-c", f"echo 'ptxas info : ({number}) wgmma.mma_async instructions are serialized' >&2", "nvcc")
    command: list[str | Path] = ["sh", CSRC / "keep_ptxas_output.sh", *compiler, "-o", tmp_path / "object"]
    ran = subprocess.run(command, env={**os.environ, "EMBERT_TEST_SERIALIZED": variable}, check=False)
    assert ran.returncode == status
