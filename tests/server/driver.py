"""A machine with two GPUs, as far as the driver's libraries go; see gpu_stand_in.c."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("gpu_stand_in.c")
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")


def build_driver(folder: Path) -> dict[str, str]:
    """Compile both libraries into `folder`; the response is the environment in which a server finds them."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make the stand-in driver with")
    first, second = (folder / name for name in LIBRARIES)
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", first, SOURCE], check=True)
    shutil.copy(first, second)
    return {"LD_LIBRARY_PATH": str(folder)}
