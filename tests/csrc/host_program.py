"""C++ of csrc that needs CUDA's headers but no GPU, built with the host's compiler."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
OBJECTS = CSRC.parent / "build" / "host-objects"
OPTIONS = ("-std=c++17", "-O1")
# The encoder's host side with stand-ins for CUDA's runtime and for the device's kernels.
HOST_SIDE = tuple(
    Path(__file__).with_name(f"{name}.cpp")
    for name in ("host_side", "computing_device", "recording_runtime", "small_models")
)


def build(folder: Path, *sources: Path, name: str = "program", flags: Sequence[str] = ()) -> Path:
    """The program made of these files, without a warning. Skips where a compiler or CUDA's headers are missing."""
    built = folder / name
    _run("-o", built, *(_object(source, tuple(flags)) for source in sources), *flags)
    return built


def output_of(program: Path, *arguments: object) -> str:
    """Run a program that succeeds."""
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


@functools.cache  # programs share most of their sources
def _object(source: Path, flags: tuple[str, ...]) -> Path:
    """Kept from run to run in build/, where other processes find it too: they wait while one compiles it."""
    compile_ = ("-c", "-Wall", "-Wextra", "-isystem", str(_headers()), "-I", str(CSRC), *flags)
    code = source.read_bytes()
    code += b"".join((CSRC / name).read_bytes() for name in re.findall(r'#include "(.+\.cpp)"', code.decode()))
    content = hashlib.sha256(repr((_toolchain(), OPTIONS, compile_)).encode() + code).hexdigest()
    name = f"{source.parent.name}-{source.stem}-{hashlib.sha256(repr((source, flags)).encode()).hexdigest()[:8]}"
    made = OBJECTS / f"{name}-{content[:16]}.o"
    OBJECTS.mkdir(parents=True, exist_ok=True)
    with (OBJECTS / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_file():
            for old in OBJECTS.glob(f"{name}-*.o"):
                old.unlink()
            part = made.with_suffix(".part")
            _run(*compile_, source, "-o", part)
            part.rename(made)
    return made


@functools.cache
def _toolchain() -> str:
    """Digest of an object's other inputs: the compiler, CUDA's headers and every header of ours."""
    version = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    told = hashlib.sha256(version.encode() + (_headers() / "cuda.h").read_bytes())
    for folder in (CSRC, Path(__file__).parent):
        for header in sorted((*folder.rglob("*.h"), *folder.rglob("*.cuh"))):
            told.update(str(header).encode() + header.read_bytes())
    return told.hexdigest()


def _headers() -> Path:
    nvcc = shutil.which("nvcc")
    toolkits = [Path("/usr/local/cuda"), *([Path(nvcc).resolve().parents[1]] if nvcc else [])]
    headers = next((kit / "include" for kit in toolkits if (kit / "include" / "cuda_runtime.h").is_file()), None)
    if headers is None:
        pytest.skip("needs CUDA's headers")
    return headers


def _compiler() -> str:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    return compiler


def _run(*arguments: str | Path) -> None:
    command = [_compiler(), *OPTIONS, *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert not found.stderr
