"""C++ of csrc that needs CUDA's headers but no GPU, built with the host's compiler."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

__all__ = ["COMPUTED", "CSRC", "RECORDED", "build"]

CSRC = Path(__file__).parents[2] / "csrc"
# The encoder's host side.
HOST = (
    Path(__file__).with_name("recording_runtime.cpp"),
    *sorted((CSRC / "runtime").glob("*.cpp")),
    *sorted((CSRC / "model").glob("*.cpp")),
    CSRC / "device" / "capability.cpp",
    CSRC / "heads" / "splade" / "splade.cpp",
)
# The same with what stands in for the device's kernels: what only writes down, what computes on the CPU.
RECORDED = (Path(__file__).with_name("recording_device.cpp"), *HOST)
COMPUTED = (Path(__file__).with_name("computing_device.cpp"), *HOST)


def build(folder: Path, *sources: Path, name: str = "program", flags: Sequence[str] = ()) -> Path:
    """The program made of these files, without a warning. Skips where a compiler or CUDA's headers are missing."""
    built = folder / name
    _run("-o", built, *(_object(source, tuple(flags)) for source in sources), *flags)
    return built


@functools.cache  # programs share most of their sources
def _object(source: Path, flags: tuple[str, ...]) -> Path:
    made = Path(_objects().name) / f"{len(list(Path(_objects().name).iterdir()))}.o"
    _run("-c", "-Wall", "-Wextra", "-isystem", _headers(), "-I", CSRC, *flags, source, "-o", made)
    return made


@functools.cache
def _objects() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="embert-objects-")


def _headers() -> Path:
    nvcc = shutil.which("nvcc")
    toolkits = [Path("/usr/local/cuda"), *([Path(nvcc).resolve().parents[1]] if nvcc else [])]
    headers = next((kit / "include" for kit in toolkits if (kit / "include" / "cuda_runtime.h").is_file()), None)
    if headers is None:
        pytest.skip("needs CUDA's headers")
    return headers


def _run(*arguments: str | Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    command = [compiler, "-std=c++17", "-O1", *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert not found.stderr
