"""C++ of csrc that needs CUDA's headers but no GPU, built with the host's compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

__all__ = ["CSRC", "RECORDED", "build"]

CSRC = Path(__file__).parents[2] / "csrc"
# The encoder's host side, and what stands in for the device.
RECORDED = (
    Path(__file__).with_name("recording_device.cpp"),
    *(CSRC / "encoder" / name for name in ("encoder.cpp", "forward.cpp", "weights.cpp", "batch.cpp", "device.cpp")),
)


def build(folder: Path, *sources: Path, name: str = "program", flags: Sequence[str] = ()) -> Path:
    """The program made of these files, without a warning. Skips where a compiler or CUDA's headers are missing."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    nvcc = shutil.which("nvcc")
    toolkits = [Path("/usr/local/cuda"), *([Path(nvcc).resolve().parents[1]] if nvcc else [])]
    headers = next((kit / "include" for kit in toolkits if (kit / "include" / "cuda_runtime.h").is_file()), None)
    if headers is None or compiler is None:
        pytest.skip("needs CUDA's headers and a C++ compiler")
    built = folder / name
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-isystem", headers, "-I", CSRC, *sources]
    found = subprocess.run(
        [*map(str, command), *flags, "-o", str(built)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert not found.stderr
    return built
