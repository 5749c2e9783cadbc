"""What GitHub runs: pinned, with the least rights, and in agreement with what it builds. actionlint reads it in CI."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.dockerfile import stages
from tests.server.live import ROOT

FOLDER = ROOT / ".github" / "workflows"
FILES = sorted(FOLDER.glob("*.yml"))
WORKFLOWS: dict[str, dict[Any, Any]] = {path.stem: yaml.safe_load(path.read_text()) for path in FILES}
JOBS = {f"{name}/{job}": value for name, flow in WORKFLOWS.items() for job, value in flow["jobs"].items()}
STEPS = [(name, step) for name, job in JOBS.items() for step in job.get("steps", [])]
RUNS = [(name, step["run"]) for name, step in STEPS if "run" in step]


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


@pytest.mark.parametrize("name", JOBS)
def test_a_job_ends(name: str) -> None:
    assert "uses" in JOBS[name] or JOBS[name]["timeout-minutes"] <= 120


def test_tokens_are_not_left_in_clones() -> None:
    checkouts = [step for _, step in STEPS if step.get("uses", "").startswith("actions/checkout@")]
    assert len(checkouts) >= 4
    assert all(step["with"] == {"persist-credentials": False} for step in checkouts)


@pytest.mark.parametrize(("name", "script"), RUNS)
def test_scripts_are_sound(name: str, script: str) -> None:
    assert "${{" not in script, "a value is handed over in `env`: here it would be read as shell"
    shellcheck = Path(sys.executable).with_name("shellcheck")
    ran = subprocess.run(
        [shellcheck, "--shell=bash", "-"], input=script, capture_output=True, text=True, check=False, encoding="utf-8"
    )
    assert ran.returncode == 0, ran.stdout
    for ours in re.findall(r"(?:^|\s)((?:scripts|\.ci)/\w+)", script):
        assert (ROOT / ours).is_file()


def test_ci_runs_what_a_developer_runs() -> None:
    assert any(".ci/run" in script for name, script in RUNS if name == "ci/test")


def test_both_processors() -> None:
    machines = {each["machine"] for each in JOBS["wheels/build"]["strategy"]["matrix"]["include"]}
    assert machines == {"x86_64", "aarch64"}
    matrix = JOBS["images/build"]["strategy"]["matrix"]
    assert matrix == {"target": ["gpu", "cpu"], "machine": ["amd64", "arm64"]}
    assert set(matrix["target"]) <= set(stages())


def test_images_say_what_they_are_made_of() -> None:
    (build,) = (step["with"] for _, step in STEPS if step.get("uses", "").startswith("docker/build-push-action@"))
    assert build["sbom"] is True
    assert build["provenance"] == "mode=max"
    arguments = {argument.value.split("=")[0] for stage in stages().values() for argument in stage.all("ARG")}
    assert {line.split("=")[0] for line in build["build-args"].splitlines()} <= arguments


def test_pypi_trusts_the_workflow_and_no_token() -> None:
    assert JOBS["release/pypi"]["permissions"] == {"id-token": "write"}
    assert JOBS["release/pypi"]["environment"] == "pypi"
    assert not re.search(r"secrets\.|password: (?!\$\{\{ github\.token \}\})", "".join(f.read_text() for f in FILES))


def test_kubernetes_runs_what_is_published() -> None:
    assert WORKFLOWS["images"]["env"]["IMAGE"] == "ghcr.io/${{ github.repository }}"
    values = yaml.safe_load((ROOT / "docker" / "helm" / "embert" / "values.yaml").read_text())
    assert values["image"]["repository"] == "ghcr.io/embert/embert"
