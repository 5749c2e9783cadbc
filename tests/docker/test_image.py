"""Packages that images install: with hashes, and of the base's CUDA. scripts/image builds an image and tries it."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.server.live import ROOT

SCRIPTS = ROOT / "docker" / "image"


def test_a_base_of_another_cuda_is_refused(tmp_path: Path) -> None:
    """cuBLASLt and nvcc must be of one major version, or FP32 and older GPUs are refused when the model loads."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    nvcc.chmod(0o755)
    (tmp_path / "apt-get").symlink_to("/bin/false")
    command = [str(SCRIPTS / "tools"), "compiler", "13"]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr == ("tools: CUDA_BASE has CUDA 12, and CUDA_MAJOR is 13: build with --build-arg CUDA_MAJOR=12\n")
    ran = subprocess.run([SCRIPTS / "environment", "gpu", "yes", "11"], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "no list of packages for CUDA 11" in ran.stderr


PIN = re.compile(r"^([\w.-]+)==(\S+)")


@pytest.mark.parametrize("path", sorted((SCRIPTS / "requirements").iterdir()), ids=lambda path: path.name)
def test_what_an_image_installs_has_hashes(path: Path) -> None:
    pinned = {canonical(match[1]): match[2] for line in path.read_text().splitlines() if (match := PIN.match(line))}
    blocks = re.split(r"^(?=[\w.-]+==)", path.read_text(), flags=re.MULTILINE)[1:]
    assert len(blocks) == len(pinned)
    assert all("--hash=sha256:" in block for block in blocks)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = {canonical(match[1]): match[2] for line in lines if (match := PIN.match(line))}
    both = set(pinned) & set(constraints)
    assert {name: pinned[name] for name in both} == {name: constraints[name] for name in both}, "run scripts/lock"
    if path.name == "embert.txt":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [*project["dependencies"], *project["optional-dependencies"]["otel"]]
        needed = {canonical(re.split(r"[<>=]", line)[0]) for line in wanted}
        assert needed <= set(pinned), "run scripts/lock"
        assert not {"torch", "transformers"} & set(pinned)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
