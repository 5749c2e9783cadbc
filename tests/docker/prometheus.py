"""Debian's Prometheus, scraping a server of ours with the configuration and rules of docker/prometheus."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.server.live import ROOT, free_port, until

FOLDER = ROOT / "docker" / "prometheus"
_COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
FEATURES = [each for each in _COMPOSE["services"]["prometheus"]["command"] if each.startswith("--enable-feature")]


def binary(name: str) -> str:
    """The path of `prometheus` or `promtool`, or a skip."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}: apt-get install prometheus")
    return found


@dataclass
class Prometheus:
    client: httpx.Client

    def get(self, path: str, **parameters: str) -> Any:
        """Returns the `data` of a response of its API. Raises AssertionError for an invalid query."""
        response = self.client.get(f"/api/v1/{path}", params=parameters).json()
        assert response["status"] == "success", (parameters, response)
        return response["data"]

    def values(self, query: str) -> list[float]:
        """Values of an instant query that are numbers."""
        found = (float(series["value"][1]) for series in self.get("query", query=query)["result"])
        return [value for value in found if value == value]


@contextlib.contextmanager
def prometheus(folder: Path, target: str, dcgm: str, *, alert_after: str | None = None) -> Iterator[Prometheus]:
    """Prometheus over `target` and `dcgm`, every second instead of every fifteen; all else as in docker/prometheus.

    `alert_after` replaces the minutes for which an alert's condition must hold.
    """
    address = f"127.0.0.1:{free_port()}"
    text = (FOLDER / "prometheus.yml").read_text()
    replaced = {
        "embert:9090": target,
        "localhost:9090": address,
        "dns_sd_configs": "static_configs",
        "{names: [dcgm], type: A, port: 9400}": f"targets: [{dcgm}]",
        "15s": "1s",
    }
    for ours, theirs in replaced.items():
        assert ours in text
        text = text.replace(ours, theirs)
    config = folder / "prometheus.yml"
    config.write_text(text)
    rules = (FOLDER / "rules.yml").read_text()
    if alert_after is not None:
        rules = re.sub(r"for: \d+m", f"for: {alert_after}", rules)
    (folder / "rules.yml").write_text(rules)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [binary("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address={address}", "--log.level=warn", *FEATURES],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=60) as client:

            def is_ready() -> bool:
                assert process.poll() is None, (folder / "log").read_text()
                with contextlib.suppress(httpx.TransportError):
                    return client.get("/-/ready").status_code == 200
                return False

            until(is_ready, what="Prometheus")
            yield Prometheus(client)
    finally:
        process.terminate()
        process.wait(60)
