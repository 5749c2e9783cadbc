"""scripts/install after a run that was interrupted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.server.live import ROOT


def install(root: Path, python: Path) -> subprocess.CompletedProcess[str]:
    """Run a copy of the script under `root`, where nothing can be downloaded."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "EMBERT_"))}
    env |= {"PYTHON": str(python), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run([root / "scripts" / "install"], env=env, capture_output=True, text=True, check=False)


def test_half_made_environment_is_made_again(tmp_path: Path) -> None:
    for folder in ("scripts", "csrc", "embert", "engine", "server"):
        (tmp_path / folder).mkdir()
    for name in ("scripts/install", "pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    debian = tmp_path / "python3"  # without its package python3-venv
    debian.write_text(
        f'#!/bin/sh\n[ "$2" != venv ] || {{ "{sys.executable}" -m venv --without-pip "$4"; exit 1; }}\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    debian.chmod(0o755)
    first = install(tmp_path, debian)
    assert first.returncode == 1
    assert "apt install python3-venv" in first.stderr

    second = install(tmp_path, Path(sys.executable))
    assert second.returncode == 1, "no index to install from"
    assert "No module named pip" not in second.stderr
    pip: list[str | Path] = [tmp_path / ".venv" / "bin" / "python", "-m", "pip", "--version"]
    assert subprocess.run(pip, capture_output=True, check=False).returncode == 0

    (packages,) = (tmp_path / ".venv" / "lib").glob("python3*/site-packages")
    half = packages / "half-1.0.dist-info"  # as pip leaves a package when it is killed before RECORD
    half.mkdir()
    (half / "METADATA").write_text("Metadata-Version: 2.1\nName: half\nVersion: 1.0\n")
    install(tmp_path, Path(sys.executable))
    assert not half.exists()
    assert subprocess.run(pip, capture_output=True, check=False).returncode == 0
