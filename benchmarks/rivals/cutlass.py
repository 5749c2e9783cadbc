"""CUTLASS's matrix products for Hopper: cutlass_gemm.cu, compiled here and called through ctypes.

The headers are those of the package `nvidia-cutlass`, or of the source tree that CUTLASS_PATH names. Compiled kernels
are cached by source, headers, compiler and options.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

SOURCE = Path(__file__).with_name("cutlass_gemm.cu")
CACHE = Path(__file__).parents[2] / "build" / "rivals"
# In the order of cutlass_gemm.cu's numbers for them.
SCHEDULES = ("ping-pong 128x128", "cooperative 128x256")
EPILOGUES = ("bias", "erf GELU", "tanh GELU", "residual")  # a bias in all of them
SWIZZLES = (1, 4)  # candidates at a transformer's shapes
FLAGS = (
    "-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a",
    "-shared", "-Xcompiler=-fPIC", "-cudart=static",
)  # fmt: skip
COMPILATION_BYTES = 4 << 30


class Missing(Exception):
    """CUTLASS's kernels are not available here; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled product: y = epilogue(x · weightᵀ + bias)."""

    schedule: str
    epilogue: str
    function: Any

    def __call__(
        self,
        stream: int,
        x: int,
        weight: int,
        bias: int,
        residual: int,
        y: int,
        *,
        rows: int,
        out: int,
        in_: int,
        swizzle: int,
    ) -> None:
        """Launch on `stream`. Device addresses: x [rows, in_], weight [out, in_], residual and y [rows, out].

        Raises RuntimeError where CUTLASS refuses.
        """
        refusal = self.function(x, weight, bias, residual, y, rows, out, in_, swizzle, stream)
        if refusal is not None:
            raise RuntimeError(f"CUTLASS ({self.schedule}, {self.epilogue}): {refusal.decode()}")


def load(cache: Path = CACHE) -> list[Kernel]:
    """Return every schedule with every epilogue. Compiles those not in `cache`: a minute, with a core for each.

    Raises Missing without headers or nvcc, and where they cannot be compiled.
    """
    includes, nvcc = _includes(), _nvcc()
    command = [nvcc, *FLAGS, *(f"-I{folder}" for folder in includes)]
    key = _key(command, includes)
    wanted = {
        (schedule, epilogue): cache / f"cutlass-{key}-{i}{j}.so"
        for (i, schedule), (j, epilogue) in itertools.product(enumerate(SCHEDULES), enumerate(EPILOGUES))
    }
    _compile(command, [library for library in wanted.values() if not library.is_file()])
    return [Kernel(*names, _function(library)) for names, library in wanted.items()]


def _includes() -> list[Path]:
    roots = [Path(path)] if (path := os.environ.get("CUTLASS_PATH")) else []
    package = importlib.util.find_spec("cutlass_library")
    if package is not None:
        roots += [Path(folder) / "source" for folder in package.submodule_search_locations or ()]
    for root in roots:
        if (root / "include" / "cutlass" / "version.h").is_file():
            return [root / "include", root / "tools" / "util" / "include"]
    raise Missing(
        "CUTLASS's headers are not here (pip install nvidia-cutlass==4.2.0.0; CUTLASS_PATH names a source tree)"
    )


def _nvcc() -> str:
    homes = [Path(home) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    path = os.pathsep.join(map(str, [os.environ.get("PATH", ""), *homes, "/usr/local/cuda/bin"]))
    found = shutil.which("nvcc", path=path)
    if found is None:
        raise Missing("CUTLASS's kernels cannot be compiled: nvcc was not found")
    return found


def _key(command: Sequence[str], includes: Sequence[Path]) -> str:
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout
    headers = includes[0] / "cutlass" / "version.h"
    parts = (SOURCE.read_bytes(), "\0".join(command).encode(), version, headers.read_bytes())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _compile(command: list[str], libraries: list[Path]) -> None:
    if not libraries:
        return
    memory = psutil.virtual_memory().available // COMPILATION_BYTES
    jobs = max(1, min(len(libraries), len(os.sched_getaffinity(0)), memory))
    print(f"compiling {len(libraries)} CUTLASS kernels, {jobs} at once", file=sys.stderr, flush=True)

    def compile_one(library: Path) -> None:
        library.parent.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}.part")
        which = [f"-DCOOPERATIVE={library.stem[-2]}", f"-DEPILOGUE={library.stem[-1]}"]
        done = subprocess.run(
            [*command, *which, str(SOURCE), "-o", str(part)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            reason = next((line for line in done.stderr.splitlines() if "error" in line), f"status {done.returncode}")
            raise Missing(f"CUTLASS's kernels do not compile: {reason}")
        part.replace(library)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(compile_one, libraries))


def _function(library: Path) -> Any:
    function = ctypes.CDLL(str(library)).cutlass_gemm
    function.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int] * 4 + [ctypes.c_void_p]
    function.restype = ctypes.c_char_p
    return function
