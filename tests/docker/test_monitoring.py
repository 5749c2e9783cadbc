"""Prometheus watches a server under load; every query of the dashboard and of the rules is asked, and finds data."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog import encoder, plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.docker.dcgm import dcgm_exporter
from tests.docker.prometheus import FOLDER, Prometheus, binary, prometheus
from tests.server.driver import build_driver
from tests.server.live import ROOT, STAND_IN, Live, live, until
from tests.server.stand_in import FAIL, LOSE

GRAFANA = ROOT / "docker" / "grafana"
DASHBOARD = json.loads((GRAFANA / "embert.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]]
ALERTS = [rule for rule in RULES if "alert" in rule]
THRESHOLD = re.compile(r"^(.+) (==|>|<) ([\d.]+)$", re.DOTALL)

QUERIES = {f"{panel['title']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]}
# An alert finds nothing until it fires, so what it compares is asked for, and what it misses.
QUERIES |= {rule["alert"]: re.sub(r"^absent\((.+)\)$", r"\1", THRESHOLD.sub(r"\1", rule["expr"])) for rule in ALERTS}
QUERIES |= {rule["record"]: rule["record"] for rule in RULES if "record" in rule}
# KEDA's, without the label that Kubernetes' service discovery adds.
SCALED = (ROOT / "docker" / "helm" / "embert" / "templates" / "scaledobject.yaml").read_text()
QUERIES |= {
    f"scaling: {name}": query.replace("{{ $of }}", "")
    for name, query in re.findall(r"name: (\w+)\n(?:.*\n){3} +query: (.+)", SCALED)
}
CHOSEN = {"$job": "embert", "$__rate_interval": "10s"}
CHOSEN |= {f"${name}": ".*" for name in ("namespace", "service", "instance", "model", "engine", "gpu_host")} | {
    "$priority": ".+"
}


def chosen(query: str, priority: str = ".+") -> str:
    """A query of the dashboard, with everything chosen at the top, or one priority only."""
    for variable, value in (CHOSEN | {"$priority": priority}).items():
        query = query.replace(variable, value)
    return query


class Load(threading.Thread):
    """Requests of every kind, over and over, until told to stop."""

    def __init__(self, server: Live) -> None:
        super().__init__(daemon=True)
        self._server = server
        self.stop = threading.Event()

    def run(self) -> None:
        requests: list[tuple[str, Any]] = [
            ("/embed", {"inputs": ["a text", "another, which is longer than the first"]}),
            ("/", {"inputs": "a text"}),
            ("/v1/embeddings", {"input": ["some text"] * 7}),
            ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}),
            ("/embed", {"inputs": [7] * 300}),  # is cut
            ("/embed", {"inputs": ["too many"] * 2049}),  # 413
            ("/embed", {"inputs": [101, FAIL, 102]}),  # 424
            ("/embed", {"inputs": [[7] * 250] * 200}),  # 429 next to others
        ]
        with self._server.client(headers={"x-request-id": "load-1"}) as client:
            for priority in itertools.cycle(("interactive", "bulk")):
                for path, body in requests:
                    client.post(path, json=body, headers={"x-priority": priority})
                if self.stop.wait(0.25):
                    return


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus over a server under load that has a (stand-in) GPU and has lost its engine once."""
    binary("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    env = build_driver(folder) | {"STAND_IN_DEVICE": "cuda:0", "STAND_IN_S": "0.01"}
    options = [*STAND_IN, "--metrics-port", "0", "--max-queue-tokens", "40000"]
    with live(*options, env=env, clean_log=False) as server:
        load = Load(server)
        with dcgm_exporter() as dcgm, prometheus(folder, server.metrics_url.removeprefix("http://"), dcgm) as watching:
            assert server.post("/embed", {"inputs": [101, LOSE, 102]}).status_code >= 400
            until(server.is_ready, what="readiness after the loss of the engine")
            load.start()
            yield watching
        load.stop.set()
        load.join(60)


# --- what Prometheus is told ---


@pytest.mark.parametrize(
    "command",
    [("check", "config", "prometheus.yml"), ("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")],
)
def test_promtool(command: tuple[str, ...]) -> None:
    ran = subprocess.run([binary("promtool"), *command], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_alert_is_tested_both_ways() -> None:
    cases = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    tested = [case for test in cases for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in ALERTS}
    assert {case["alertname"] for case in tested if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in tested if not case.get("exp_alerts")} == names


# --- what Grafana is told ---


def test_the_dashboard_is_current(tmp_path: Path) -> None:
    for file in GRAFANA.glob("*.py"):
        shutil.copy(file, tmp_path)
    subprocess.run(["python3", tmp_path / "dashboard.py"], check=True)
    assert (tmp_path / "embert.json").read_text() == (GRAFANA / "embert.json").read_text(), "run scripts/document"


def test_grafana_knows_every_field() -> None:
    """Through Grafana's own schema and back: nothing may be lost on the way."""
    plugins.register_default_plugins()
    known = json.loads(encoder.JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))

    def lost(ours: Any, theirs: Any, path: str = "") -> list[str]:
        if isinstance(ours, dict):
            return [each for key in ours for each in lost(ours[key], theirs.get(key, path), f"{path}/{key}")]
        if isinstance(ours, list):
            assert len(ours) == len(theirs), path
            return [each for i, item in enumerate(ours) for each in lost(item, theirs[i], f"{path}/{i}")]
        return [] if ours == theirs else [path]

    assert lost(DASHBOARD, known) == ["/annotations/list/0/titleFormat"]  # of Prometheus' annotations alone


def test_every_metric_is_watched() -> None:
    """Whatever we measure is on the dashboard or in an alert, or is named here."""
    queries = " ".join(QUERIES.values())
    documented = set(
        re.findall(r"^\| `((?:embert|process)_\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    )
    deprecated = {"embert_api_restarts_total"}
    for_developers = {"embert_padding_tokens_total", "embert_batches_total", "embert_queue_texts"}
    assert {name for name in documented if name not in queries} == for_developers | deprecated
    used = set(re.findall(r"\b((?:embert|process)_\w+)", queries))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} <= documented


# --- and what they find ---


def test_the_server_is_scraped(watched: Prometheus) -> None:
    def is_up() -> bool:
        targets = watched.get("targets")["activeTargets"]
        found = {target["labels"]["job"]: target["health"] for target in targets}
        return found == dict.fromkeys(("embert", "dcgm", "prometheus"), "up")

    until(is_up, what="all targets up")


@pytest.mark.parametrize("name", QUERIES)
def test_every_query_finds_something(watched: Prometheus, name: str) -> None:
    query = chosen(QUERIES[name])
    assert "$" not in query
    found = until(lambda: watched.values(query), what=query)
    assert all(value >= 0 for value in found)


def test_numbers_are_what_happened(watched: Prometheus) -> None:
    """Not only something: the engine that was lost, the responses by status, the GPU's memory."""
    until(lambda: watched.values("sum(embert_engine_restarts_total)") == [1], what="the engine that was lost")
    for status in (200, 413, 424):
        assert until(lambda status=status: watched.values(f'embert_requests_total{{status="{status}"}} > 0'))  # type: ignore[misc]
    shares = "embert:work_failed:ratio5m"
    until(lambda: [0.05 < share < 0.3 for share in watched.values(shares)] == [True], what="one failure in eight")
    memory = "embert_gpu_memory_bytes / embert_gpu_memory_limit_bytes"
    assert until(lambda: watched.values(memory), what="the GPU's memory") == [21 / 80]


def test_rules_are_evaluated_without_errors(watched: Prometheus) -> None:
    groups = watched.get("rules")["groups"]
    states = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert len(states) == len(RULES)
    assert {rule["health"] for rule in states.values()} == {"ok"}
    until(lambda: watched.values('ALERTS{alertname="EmbertErrors", alertstate="pending"}'), what="a pending alert")


def test_prometheus_keeps_exemplars(watched: Prometheus) -> None:
    """Exemplars have the ids of the load's requests."""

    def ids() -> set[str]:
        now = time.time()
        found = watched.get(
            "query_exemplars", query="embert_request_duration_seconds_bucket", start=str(now - 300), end=str(now)
        )
        return {each["labels"]["request_id"] for series in found for each in series["exemplars"]}

    until(lambda: any(each.startswith("load-") for each in ids()), what="an exemplar of the load")
