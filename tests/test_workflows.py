"""GitHub's workflows: pinned, with the least rights and without tokens. actionlint reads the rest in CI."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.server.live import ROOT

FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
WORKFLOWS: dict[str, dict[Any, Any]] = {path.stem: yaml.safe_load(path.read_text()) for path in FILES}
JOBS = {f"{name}/{job}": value for name, flow in WORKFLOWS.items() for job, value in flow["jobs"].items()}
STEPS = [(name, step) for name, job in JOBS.items() for step in job.get("steps", [])]


def test_actions_are_pinned_by_commit() -> None:
    pins: dict[str, set[str]] = {}
    for path in FILES:
        for action, pin in re.findall(r"uses: ([\w./-]+?)(@.*)?$", path.read_text(), re.MULTILINE):
            if action.startswith("./"):
                assert (ROOT / action).is_file()
                continue
            assert re.fullmatch(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+", pin), f"{path.name}: {action}{pin}"
            pins.setdefault(action, set()).add(pin)
    assert len(pins) >= 8
    assert {action: found for action, found in pins.items() if len(found) > 1} == {}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_read_and_no_more(name: str) -> None:
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}, "jobs ask for more, each for its own"
    assert WORKFLOWS[name]["concurrency"]["group"]


def test_tokens_are_not_left_in_clones() -> None:
    checkouts = [step for _, step in STEPS if step.get("uses", "").startswith("actions/checkout@")]
    assert len(checkouts) >= 4
    assert all(step["with"] == {"persist-credentials": False} for step in checkouts)


def test_pypi_trusts_the_workflow_and_no_token() -> None:
    assert JOBS["release/pypi"]["permissions"] == {"id-token": "write"}
    assert JOBS["release/pypi"]["environment"] == "pypi"
    assert not re.search(r"secrets\.|password: (?!\$\{\{ github\.token \}\})", "".join(f.read_text() for f in FILES))
