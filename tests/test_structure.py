"""Imports between packages go one way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.live import ROOT


def test_imports_go_one_way() -> None:
    """The contracts in pyproject.toml."""
    pytest.importorskip("importlinter", reason="import-linter is of the extra dev")
    lint = Path(sys.executable).with_name("lint-imports")
    ran = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
