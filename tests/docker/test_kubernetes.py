"""The manifests: each against Kubernetes' own schema, and all of them against one another and the image."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from embert import __version__
from embert.server.api.routes import METRIC_ROUTES
from embert.server.config import ServeConfig, environment_name
from tests.docker.dockerfile import stages
from tests.server.live import ROOT

FOLDER = ROOT / "docker" / "kubernetes"
BASE = {path.stem: yaml.safe_load(path.read_text()) for path in (FOLDER / "base").glob("*.yaml")}
NAME = {"app.kubernetes.io/name": "embert"}
POD = BASE["deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
(GENERATED,) = BASE["kustomization"]["configMapGenerator"]
OPTIONS = dict(literal.split("=", 1) for literal in GENERATED["literals"])


def rendered(folder: str | Path) -> list[dict[str, Any]]:
    """What `kubectl apply -k` would send."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs kubectl for its kustomize")
    made = subprocess.run([kubectl, "kustomize", FOLDER / folder], capture_output=True, check=True)
    return list(yaml.safe_load_all(made.stdout))


@pytest.mark.parametrize("name", sorted(set(BASE) - {"kustomization"}))
def test_kubernetes_knows_every_field(name: str) -> None:
    kubernetes_validate.validate(BASE[name], kubernetes_validate.latest_version(), strict=True)


def test_every_file_is_listed() -> None:
    for folder in ("base", "monitoring"):
        files = {path.name for path in (FOLDER / folder).glob("*.yaml")}
        listed = yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text())["resources"]
        assert set(listed) == files - {"kustomization.yaml", "adapter-values.yaml"}


@pytest.mark.parametrize("folder", ["base", "cpu", "monitoring"])
def test_kustomize_renders(folder: str) -> None:
    for document in rendered(folder):
        assert document["metadata"]["labels"] == NAME
        if not document["apiVersion"].startswith("monitoring.coreos.com/"):
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    if folder != "monitoring":
        (deployment,) = (each for each in rendered(folder) if each["kind"] == "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert container["image"] == f"ghcr.io/embert/embert:{__version__}{'' if folder == 'base' else '-cpu'}"
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (folder == "base")


def test_the_documented_overlay_works(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    remote = "https://github.com/embert/embert//docker/kubernetes/base"
    assert remote in block
    (tmp_path / "kustomization.yaml").write_text(block.replace(remote, os.path.relpath(FOLDER / "base", tmp_path)))
    documents = {document["kind"]: document for document in rendered(tmp_path)}
    assert documents["ConfigMap"]["data"] == OPTIONS | {"EMBERT_MODEL": "BAAI/bge-small-en-v1.5"}
    (container,) = documents["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example/embert:0.1.0"
    assert container["envFrom"][0]["configMapRef"]["name"] == documents["ConfigMap"]["metadata"]["name"]


def test_labels_and_selectors_meet() -> None:
    assert all(document["metadata"]["labels"] == NAME for name, document in BASE.items() if name != "kustomization")
    assert BASE["deployment"]["spec"]["selector"]["matchLabels"] == NAME
    assert BASE["deployment"]["spec"]["template"]["metadata"]["labels"] == NAME
    assert BASE["service"]["spec"]["selector"] == NAME
    assert BASE["poddisruptionbudget"]["spec"]["selector"]["matchLabels"] == NAME
    assert BASE["networkpolicy"]["spec"]["podSelector"]["matchLabels"] == NAME
    assert BASE["horizontalpodautoscaler"]["spec"]["scaleTargetRef"]["name"] == BASE["deployment"]["metadata"]["name"]


def test_ports_and_probes_are_the_servers() -> None:
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert ports == {"http": ServeConfig().port, "metrics": int(OPTIONS["EMBERT_METRICS_PORT"])}
    assert {port["targetPort"] for port in BASE["service"]["spec"]["ports"]} == set(ports)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert CONTAINER[probe]["httpGet"]["path"] in METRIC_ROUTES
        assert CONTAINER[probe]["httpGet"]["port"] == "http"


def test_options_are_ours() -> None:
    known = {environment_name(name) for name in ServeConfig.__dataclass_fields__}
    assert set(OPTIONS) <= known
    assert CONTAINER["envFrom"] == [{"configMapRef": {"name": GENERATED["name"]}}]
    assert POD["enableServiceLinks"] is False, "EMBERT_PORT=tcp://… of the service would be taken for an option"


def test_the_hubs_token_comes_from_a_secret_that_may_be_missing() -> None:
    (token,) = CONTAINER["env"]
    assert token["name"] == "HF_TOKEN"
    assert set(token) == {"name", "valueFrom"}, "no token in this file"
    secret = token["valueFrom"]["secretKeyRef"]
    assert secret["optional"], "most models are public"
    page = (ROOT / "docs" / "private-models.md").read_text()
    assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in page


def test_the_pod_may_do_no_more_than_the_image_needs() -> None:
    (user,) = stages()["runtime"].all("USER")
    context = POD["securityContext"]
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == user.value
    assert context["runAsNonRoot"]
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]
    mounted = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert mounted == {"/tmp", stages()["runtime"].all("VOLUME")[0].value}


def test_the_grace_period_covers_the_drain() -> None:
    wait = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = int(OPTIONS["EMBERT_DRAIN_TIMEOUT"])
    assert POD["terminationGracePeriodSeconds"] >= wait + drain + 5


def test_what_is_scaled_on_is_a_metric() -> None:
    documented = (ROOT / "docs" / "metrics.md").read_text()
    (metric,) = BASE["horizontalpodautoscaler"]["spec"]["metrics"]
    (rule,) = yaml.safe_load((FOLDER / "monitoring" / "adapter-values.yaml").read_text())["rules"]["custom"]
    name = metric["pods"]["metric"]["name"]
    assert f"`{name}`" in documented
    assert rule["seriesQuery"].startswith(f"{name}{{")


def test_the_operators_rules_are_prometheus_rules() -> None:
    ours = yaml.safe_load((ROOT / "docker" / "prometheus" / "rules.yml").read_text())
    theirs = yaml.safe_load((FOLDER / "monitoring" / "prometheusrule.yaml").read_text())
    assert theirs["spec"] == ours, "run scripts/document"


def test_the_monitor_finds_the_service() -> None:
    monitor = yaml.safe_load((FOLDER / "monitoring" / "servicemonitor.yaml").read_text())["spec"]
    assert monitor["selector"]["matchLabels"] == BASE["service"]["metadata"]["labels"]
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in BASE["service"]["spec"]["ports"]}
    assert BASE["service"]["metadata"]["labels"][monitor["jobLabel"]] == "embert"


def test_yaml_files_hold_one_document_each() -> None:
    for path in Path(FOLDER).rglob("*.yaml"):
        assert len(list(yaml.safe_load_all(path.read_text()))) == 1, path
