"""Which GPUs the install builds the CUDA encoder for, and what it says of the others."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def answered(folder: Path, nvidia_smi: str) -> tuple[int, str]:
    """What scripts/architectures says where nvidia-smi is such a script."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    tool.chmod(0o755)
    found = subprocess.run(
        [ROOT / "scripts" / "architectures"],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not found.stderr
    return found.returncode, found.stdout.strip()


@pytest.mark.parametrize(
    ("capabilities", "architectures"),
    [
        ("9.0", "90a-real"),
        ("8.0", "80-real"),
        (r"9.0\n8.9\n9.0", "89-real;90a-real"),
        (r"7.5\n8.6", "86-real"),
        (r"10.0\n12.0", "100-real;120-real"),
        (r"[N/A]\n9.0", "90a-real"),
    ],
)
def test_gpus_that_can_be_built_for(tmp_path: Path, capabilities: str, architectures: str) -> None:
    assert answered(tmp_path, f"printf '{capabilities}\\n'") == (0, architectures)


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ("printf '7.5\\n'", "the GPU here has compute capability 7.5; the CUDA encoder needs 8.0 or newer"),
        ("printf '7.5\\n6.1\\n'", "the GPU here has compute capability 6.1 7.5; the CUDA encoder needs 8.0 or newer"),
        ("echo 'No devices were found'", "there is no NVIDIA GPU here; "),
        ("echo 'has failed because'; exit 9", "there is no NVIDIA GPU here; "),
        ("true", "there is no NVIDIA GPU here; "),
    ],
)
def test_gpus_that_cannot(tmp_path: Path, tool: str, reason: str) -> None:
    status, said = answered(tmp_path, tool)
    assert status == 1
    assert said.startswith(reason)


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["-DEMBERT_CUDA_ARCHITECTURES=75-real"], 0, "CPU encoder only (EMBERT_CUDA_ARCHITECTURES asks for 75-real"),
        (
            ["-DEMBERT_CUDA_ARCHITECTURES=90a-real;75", "-DEMBERT_CUDA=ON"],
            1,
            "but EMBERT_CUDA_ARCHITECTURES asks for 75",
        ),
    ],
)
def test_cmake_builds_nothing_for_an_old_gpu(tmp_path: Path, options: list[str], status: int, said: str) -> None:
    cmake = shutil.which("cmake", path=f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("needs cmake")
    command = [cmake, "-S", str(ROOT), "-B", str(tmp_path), *options]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == status, found.stderr
    assert said in " ".join((found.stdout + found.stderr).split())
