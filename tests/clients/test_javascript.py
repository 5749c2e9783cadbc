"""The npm packages `openai`, `@langchain/openai`, `ollama` and `ai`, each in the page's own snippet."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import PAGE, Fleet
from tests.clients.oracles import assert_embedded

PACKAGES = Path(__file__).with_name("package.json")
SNIPPETS = re.findall(r"^```js\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of package.json."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs node and npm: apt-get install nodejs npm")
    folder = tmp_path_factory.mktemp("javascript")
    shutil.copy(PACKAGES, folder)
    subprocess.run([npm, "install", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=folder, check=True)
    return folder


def test_the_page_names_the_tested_versions() -> None:
    versions = json.loads(PACKAGES.read_text())["dependencies"]
    for package in ("openai", "@langchain/openai", "ollama", "ai", "@ai-sdk/openai-compatible"):
        assert f"`{package}` {versions[package]}" in PAGE.read_text()


@pytest.mark.parametrize("snippet", SNIPPETS, ids=re.findall(r'from "([^"]+)"', "".join(s[:80] for s in SNIPPETS)))
def test_the_page(snippet: str, packages: Path, fleet: Fleet) -> None:
    command = ["node", "--input-type=module", "-e", fleet.localised(snippet)]
    ran = subprocess.run(command, cwd=packages, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert_embedded(json.loads(ran.stdout), fleet.folder("minilm"), ["a cat", "a kitten"])
