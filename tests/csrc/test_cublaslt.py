"""The portable products on a library that fails at every call in turn: nothing leaks, and the device is not lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.csrc.host_program import CSRC, build, output_of

STAND_IN = Path(__file__).with_name("stand_in_cublaslt")
OUT_OF_MEMORY, EXECUTION_FAILED = 3, 13

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("cublaslt")
    flags = ["-I", str(STAND_IN), "-DEMBERT_HAS_CUBLASLT"]
    library = build(folder, STAND_IN / "cublaslt.cpp", name="stand_in.so", flags=[*flags, "-shared", "-fPIC"])
    ours = [CSRC / "gemm" / "cublaslt.cpp"]
    sources = [Path(__file__).with_name("cublaslt_failures.cpp"), *ours]
    return build(folder, *sources, flags=[*flags, "-ldl"]), library


@pytest.mark.parametrize(("status", "kind"), [(OUT_OF_MEMORY, "refused"), (EXECUTION_FAILED, "lost")])
def test_every_call_that_fails_leaves_nothing_behind(program: tuple[Path, Path], status: int, kind: str) -> None:
    *lines, last = output_of(*program, status).splitlines()
    assert last == f"calls {len(lines) - 1}"
    assert len(lines) > 15
    said = [line.split() for line in lines]
    assert {living for _, _, living in said} == {"living=0"}
    # Where the library has no algorithm, or one that does not fit, another is asked for, whatever the status.
    kinds = [each for _, each, _ in said]
    assert kinds[-1] == "fine"
    assert set(kinds) <= {kind, "refused", "fine"}
    assert kinds.count(kind) > 12
