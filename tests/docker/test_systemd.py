"""The systemd unit, as systemd itself reads it."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from embert.server.config import ServeConfig
from tests.server.live import ROOT
from tests.test_packaging import command_path

UNIT = ROOT / "docker" / "systemd" / "embert.service"


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("needs systemd-analyze: apt-get install systemd")
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit, with the command where it is on this machine."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace("/opt/embert/bin/embert", str(command_path())))
    return path


def test_systemd_accepts_it(unit: Path) -> None:
    ran = analyze("verify", "--man=no", unit)
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")


def test_it_is_locked_up(unit: Path) -> None:
    ran = analyze("security", "--offline=true", unit)
    if "Overall exposure" not in ran.stdout:
        pytest.skip(f"this systemd does not judge files: {ran.stderr.strip()}")
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", ran.stdout)
    assert exposure is not None
    assert float(exposure[1]) < 2.0, ran.stdout


def test_it_waits_for_the_drain() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    assert float(parser["Service"]["TimeoutStopSec"]) >= ServeConfig().drain_timeout + 10
    assert parser["Service"]["ExecStart"].endswith("/embert serve")
