"""The installed distribution: its command, its version, its typing marker, its one import name, and the scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent


def project() -> dict[str, object]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert isinstance(table, dict)
    return table


def test_version_is_the_same_everywhere() -> None:
    version = project()["version"]
    assert metadata.version("embert") == version
    command = subprocess.run([command_path(), "--version"], capture_output=True, text=True, check=True)
    assert command.stdout.split()[-1] == version


def command_path() -> Path:
    return Path(sys.executable).with_name("embert")


def test_command_is_next_to_the_interpreter() -> None:
    assert os.access(command_path(), os.X_OK)
    (entry,) = metadata.entry_points(group="console_scripts", name="embert")
    assert callable(entry.load())


def test_the_package_imports_nothing_heavy() -> None:
    """`embert --help` and the supervisor need neither numpy nor tokenizers."""
    code = "import embert, sys; print(sorted({'numpy', 'tokenizers', 'torch', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_constraints_pin_every_dependency() -> None:
    """A dependency without a pin would make tomorrow's CI a different one; torch unpinned fetches gigabytes.

    cuBLAS has none: torch with CUDA wants its own.
    """
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    extras.pop("cuda")
    clients = extras.pop("clients")
    for file, chosen in (("constraints.txt", extras.values()), ("constraints-clients.txt", [clients])):
        pinned = {
            line.split("==")[0].lower().replace("_", "-")
            for line in (ROOT / file).read_text().splitlines()
            if "==" in line
        }
        requirements = [*project()["dependencies"], *(name for extra in chosen for name in extra)]  # type: ignore[misc]
        names = {
            each for requirement in requirements if not (each := requirement_name(requirement)).startswith("embert")
        }
        assert names - pinned == set(), file


def test_dependencies_have_an_upper_bound() -> None:
    """Without one, a major release of another project breaks every new installation."""
    dependencies = project()["dependencies"]
    assert isinstance(dependencies, list)
    assert [each for each in dependencies if "<" not in each] == []


def requirement_name(requirement: str) -> str:
    end = next((i for i, c in enumerate(requirement) if not (c.isalnum() or c in "-_.")), len(requirement))
    return requirement[:end].lower().replace("_", "-")
