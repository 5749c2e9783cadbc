"""GPUs that the install builds the CUDA encoder for, and its messages about the others."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def cmake(*arguments: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run CMake, with the commands of `path` before all others."""
    places = [str(path), str(ROOT / ".venv" / "bin"), os.environ["PATH"]][path is None :]
    tool = shutil.which("cmake", path=os.pathsep.join(places))
    if tool is None:
        pytest.skip("needs cmake")
    env = {**os.environ, "PATH": os.pathsep.join(places)}
    return subprocess.run([tool, *arguments], env=env, capture_output=True, text=True, check=False)


def run(folder: Path, nvidia_smi: str) -> tuple[str, str]:
    """Architectures and reason where nvidia-smi is such a script."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    tool.chmod(0o755)
    script = folder / "ask.cmake"
    script.write_text(
        f"include({ROOT}/csrc/architectures.cmake)\nembert_architectures_here(found reason)\n"
        'message("${found}|${reason}")\n'
    )
    found = cmake("-P", script, path=folder)
    assert found.returncode == 0, found.stderr
    architectures, _, reason = found.stderr.strip().partition("|")
    return architectures, reason


@pytest.mark.parametrize(
    ("capabilities", "architectures"),
    [
        (r"9.0\n8.9\n9.0", "89-real;90a-real"),
        (r"7.5\n8.6", "86-real"),
        (r"10.0\n12.0", "100-real;120-real"),
        (r"[N/A]\n9.0", "90a-real"),
    ],
)
def test_gpus_that_can_be_built_for(tmp_path: Path, capabilities: str, architectures: str) -> None:
    assert run(tmp_path, f"printf '{capabilities}\\n'") == (architectures, "")


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ("printf '7.5\\n6.1\\n'", "the GPU here has compute capability 6.1 7.5; the CUDA encoder needs 8.0 or newer"),
        ("echo 'has failed because'; exit 9", "there is no NVIDIA GPU here; "),
        ("true", "there is no NVIDIA GPU here; "),
    ],
)
def test_gpus_that_cannot(tmp_path: Path, tool: str, reason: str) -> None:
    architectures, said = run(tmp_path, tool)
    assert architectures == ""
    assert said.startswith(reason)


def test_auto_asks_the_machine_before_any_compiler(tmp_path: Path) -> None:
    """From a clone, from an sdist, whoever builds: without a GPU to build for, pip compiles no CUDA."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 7.5\n")
    tool.chmod(0o755)
    found = cmake("-S", ROOT, "-B", tmp_path / "build", "-DEMBERT_CPU=OFF", path=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "embert: CPU encoder only (the GPU here has compute capability 7.5" in found.stdout
    assert "CUDA compiler" not in found.stdout


def test_on_without_architectures_builds_them_all(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\nprintf 'compute_75\\ncompute_80\\ncompute_86\\ncompute_89\\ncompute_90\\n'\n")
    nvcc.chmod(0o755)
    script = tmp_path / "ask.cmake"
    script.write_text(
        f'include({ROOT}/csrc/architectures.cmake)\nembert_every_architecture({nvcc} found)\nmessage("${{found}}")\n'
    )
    assert cmake("-P", script).stderr.strip() == "80-real;86-real;89-real;90a-real;90-virtual"
