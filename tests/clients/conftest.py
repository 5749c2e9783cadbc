"""The servers of docs/clients.md, and its snippets run against them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.clients import models
from tests.server.live import ROOT, Live, live

# Without them, as under `make test`, there is nothing here to collect.
CLIENTS = (
    "cohere", "haystack_integrations", "langchain_cohere", "litellm", "llama_index", "ollama", "sentence_transformers",
)  # fmt: skip
if not all(map(find_spec, CLIENTS)):
    collect_ignore_glob = ["test_*.py"]

# Before they are imported: none of them asks for anything but the servers of these tests.
os.environ |= {
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}

PAGE = ROOT / "docs" / "clients.md"
Page = Callable[[str], dict[str, Any]]


class Fleet:
    """The servers that the page names, each started when first asked for."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._servers: dict[str, Live] = {}
        self._folders: dict[str, Path] = {}
        command = re.compile(r"^\$ embert serve \S+ --port (\d+) --served-model-name (\S+)$", re.MULTILINE)
        self._names = {int(port): name for port, name in command.findall(PAGE.read_text())}

    def folder(self, name: str) -> Path:
        if name not in self._folders:
            self._folders[name] = models.BUILD[name](self._folder / name)
        return self._folders[name]

    def url(self, name: str) -> str:
        """The address of the server of that --served-model-name."""
        if name not in self._servers:
            options = (str(self.folder(name)), "--served-model-name", name, "--device", "cpu", "--workers", "1")
            self._servers[name] = self._stack.enter_context(live(*options))
        return self._servers[name].url

    def localised(self, text: str) -> str:
        """`text`, with the addresses of these servers in place of the page's."""
        return re.sub(r"http://localhost:(\d+)", lambda found: self.url(self._names[int(found[1])]), text)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        yield Fleet(tmp_path_factory.mktemp("models"), stack)


@pytest.fixture(scope="session")
def page(fleet: Fleet) -> Page:
    """Runs the snippets of a section, in order and once; what they defined."""

    @functools.cache
    def run(title: str) -> dict[str, Any]:
        (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        snippets = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        assert snippets, title
        defined: dict[str, Any] = {}
        for snippet in snippets:
            exec(compile(fleet.localised(snippet), f"{PAGE.name}: {title}", "exec"), defined)
        return defined

    return run
