"""compose.yaml compared with what it starts: the image, the configuration files, the load test."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from embert.server.config import ServeConfig
from tests.docker.dockerfile import stages
from tests.server.live import ROOT

FOLDER = ROOT / "docker"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = ["gpu", "cpu"]


@pytest.mark.parametrize("name", OURS)
def test_our_services_are_targets_of_the_dockerfile(name: str) -> None:
    service = SERVICES[name]
    assert service["build"] == {"context": "..", "target": name}
    assert name in stages()
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["networks"]["default"]["aliases"] == ["embert"]
    assert ("devices" in str(service.get("deploy"))) == (name == "gpu")
    volume = service["volumes"][0].split(":")
    assert volume[0] in COMPOSE["volumes"]
    assert volume[1] == stages()["runtime"].all("VOLUME")[0].value


@pytest.mark.parametrize("name", OURS)
def test_whoever_stops_it_waits_longer_than_it_drains(name: str) -> None:
    assert float(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= ServeConfig().drain_timeout + 10


@pytest.mark.parametrize(("variable", "services"), [("HF_TOKEN", {*OURS}), ("EMBERT_API_KEY", {*OURS, "load"})])
def test_secrets_are_the_shells(variable: str, services: set[str]) -> None:
    given = {name: each["environment"] for name, each in SERVICES.items() if variable in each.get("environment", {})}
    assert set(given) == services
    assert all(of[variable] is None for of in given.values()), "one in this file would be in everybody's clone"


def test_prometheus_scrapes_the_port_that_is_served() -> None:
    config = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text())
    ours = next(job for job in config["scrape_configs"] if job["job_name"] == "embert")
    port = SERVICES["cpu"]["environment"]["EMBERT_METRICS_PORT"]
    assert ours["static_configs"] == [{"targets": [f"embert:{port}"]}]
    assert not any(port in published for published in SERVICES["cpu"]["ports"]), "metrics are not for clients"


def test_every_file_that_is_mounted_exists() -> None:
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", []) if mount.startswith("./")]
    assert len(mounts) >= 3
    for mount in mounts:
        assert (FOLDER / mount.split(":")[0]).exists(), mount


def test_nothing_is_open_to_other_hosts_unless_asked_for() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(published) == 5
    for port in published:
        assert port.startswith(("127.0.0.1:", "${BIND_ADDRESS:-127.0.0.1}:")), port
