"""Rules that csrc must keep. Each stands for a fault that no test on the right GPU would see."""

from __future__ import annotations

import itertools
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.csrc.host_program import CSRC

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use

GUARD = "#if defined(__CUDA_ARCH_FEAT_SM90_ALL)"
KERNEL = re.compile(r"__global__\s+void\s+__launch_bounds__\([^;{]*?\)\s*(\w+)\(|__global__\s+void\s+(\w+)\(")


def sources() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in (".cu", ".cuh", ".cpp", ".h"))


def test_every_source_is_built() -> None:
    listed = {
        folder / path
        for folder in (CSRC, CSRC / "cpu")
        for path in re.findall(r"(?<![\w}/])[\w/]+\.(?:cu|cpp)\b", (folder / "CMakeLists.txt").read_text())
    } | {CSRC / "bindings" / "cpu.cpp"}
    assert listed == {path for path in sources() if path.suffix in (".cu", ".cpp")}


def weak_symbols(objects: Iterable[Path]) -> set[str]:
    """Inline functions that the objects hold: the linker keeps one of each name."""
    lines = subprocess.run(["nm", *objects], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[2] for line in lines if len(line.split()) == 3 and line.split()[1] in "WVu"}


INSTRUCTION_SETS = ("embert_cpu_avx2", "embert_cpu_avx512")
if platform.machine() == "aarch64":
    INSTRUCTION_SETS = ("embert_cpu_neon", "embert_cpu_neon_dot")


def test_no_inline_function_is_compiled_for_two_instruction_sets() -> None:
    """The linker could keep the one that was compiled for the newer, and another CPU would stop at its instructions."""
    builds = [path for path in (CSRC.parent / "build").glob("*/csrc/cpu/CMakeFiles") if (path / "_cpu.dir").is_dir()]
    if not builds or shutil.which("nm") is None:
        pytest.skip("the kernels for CPUs were not built here")
    (build,) = sorted(builds, key=lambda path: path.stat().st_mtime)[-1:]
    groups = [
        weak_symbols(path for path in build.glob(f"{target}.dir/**/*.cpp.o") if "nanobind" not in str(path))
        for target in (*INSTRUCTION_SETS, "embert_cpu")
    ]
    groups[2] |= weak_symbols(path for path in build.glob("_cpu.dir/**/*.cpp.o") if "nanobind" not in str(path))
    assert all(groups)
    shared = {name for one, other in itertools.combinations(groups, 2) for name in one & other}
    assert shared <= {"DW.ref.__gxx_personality_v0"}


def test_a_body_for_sm_90a_traps_elsewhere() -> None:
    """A body that vanishes for another architecture would return: zeros that nobody wrote pool like rows."""
    found = set()
    for path in sources():
        text = path.read_text()
        for body in re.finditer(r'EMBERT_SM90A\(\s*"(\w+)"', text):  # common/launch.cuh
            assert next(filter(None, KERNEL.findall(text[: body.start()])[-1])) == body[1], path.name
            found.add(body[1])
        if path.name == "launch.cuh":
            continue
        for start in (match.start() for match in re.finditer(re.escape(GUARD), text)):
            kernel = next(filter(None, KERNEL.findall(text[:start])[-1]))
            if kernel == "build_kernel":  # which tells that it has no such body
                continue
            end = text.index("#endif", start)
            assert f'#else\n  EMBERT_TRAP("{kernel}");\n' in text[start:end], f"{path.name}: {kernel}"
            found.add(kernel)
    assert len(found) > 15


def test_nothing_works_on_the_legacy_stream_unawaited() -> None:
    """The encoder's streams do not wait for it, and cudaMemset returns before it is done."""
    for path in sources():
        calls = re.findall(r"cudaMemset\(|cudaMemset2D\(", path.read_text())
        assert not calls or path.name == "memory.h", path.name
