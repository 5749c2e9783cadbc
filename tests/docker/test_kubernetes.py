"""The manifests: each against Kubernetes' own schema, and all of them against one another and the image."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from embert import __version__
from embert.server.config import ServeConfig, environment_name
from embert.server.frontend.routes import METRIC_ROUTES
from tests.docker.dockerfile import stages
from tests.docker.manifests import KUSTOMIZE as FOLDER
from tests.docker.manifests import by_kind, check, kustomized, pods_selected
from tests.server.live import ROOT

BASE = {path.stem: yaml.safe_load(path.read_text()) for path in (FOLDER / "base").glob("*.yaml")}
NAME = {"app.kubernetes.io/name": "embert"}
LABELS = NAME | {"app.kubernetes.io/instance": "embert"}
POD = BASE["deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
(GENERATED,) = BASE["kustomization"]["configMapGenerator"]
OPTIONS = dict(literal.split("=", 1) for literal in GENERATED["literals"])


@pytest.mark.parametrize("name", sorted(set(BASE) - {"kustomization"}))
def test_kubernetes_knows_every_field(name: str) -> None:
    check(BASE[name])


def test_every_file_is_listed() -> None:
    for folder in ("base", "monitoring"):
        files = {path.name for path in (FOLDER / folder).glob("*.yaml")}
        listed = yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text())["resources"]
        assert set(listed) == files - {"kustomization.yaml", "adapter-values.yaml"}


@pytest.mark.parametrize("folder", ["base", "cpu"])
def test_kustomize_renders(folder: str) -> None:
    documents = by_kind(kustomized(folder))
    for document in documents.values():
        assert document["metadata"]["labels"] == LABELS
        check(document)
    deployment = documents["Deployment"]["spec"]
    (container,) = deployment["template"]["spec"]["containers"]
    assert container["image"] == f"ghcr.io/embert/embert:{__version__}{'' if folder == 'base' else '-cpu'}"
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (folder == "base")
    assert ("cpu" in container["resources"]["limits"]) == (folder == "cpu"), "the encoder has a thread for each CPU"
    # A pod that comes before another goes needs a GPU that nobody uses.
    surge = {"maxSurge": 0, "maxUnavailable": 1} if folder == "base" else {"maxSurge": 1, "maxUnavailable": 0}
    assert deployment["strategy"]["rollingUpdate"] == surge


def test_what_watches_is_found_by_its_release() -> None:
    for document in kustomized("monitoring"):
        assert document["metadata"]["labels"] == NAME | {"release": "kube-prometheus-stack"}


def overlay(title: str, folder: Path) -> dict[str, Any]:
    """What the page's overlay after this sentence renders to, by kind."""
    page = (ROOT / "docs" / "deployment.md").read_text()
    block = page.split(title, 1)[1].split("```yaml\n", 1)[1].split("```", 1)[0]
    remote = "https://github.com/embert/embert//docker/kubernetes"
    assert remote in block
    (folder / "kustomization.yaml").write_text(block.replace(remote, os.path.relpath(FOLDER, folder)))
    documents = by_kind(kustomized(folder))
    for document in documents.values():
        check(document)
    return documents


def test_the_documented_overlay_works(tmp_path: Path) -> None:
    documents = overlay("Make an overlay of your own", tmp_path)
    assert documents["ConfigMap"]["data"] == OPTIONS | {"EMBERT_MODEL": "BAAI/bge-small-en-v1.5"}
    pod = documents["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "registry.example/embert:0.1.0"
    assert container["envFrom"][0]["configMapRef"]["name"] == documents["ConfigMap"]["metadata"]["name"]
    assert pod["runtimeClassName"] == "nvidia"


def test_two_instances_in_a_namespace_leave_each_others_pods_alone(tmp_path: Path) -> None:
    first = by_kind(kustomized("base"))
    second = overlay("A second instance", tmp_path)
    pods = {
        name: of["Deployment"]["spec"]["template"]["metadata"]["labels"] for name, of in (("1", first), ("2", second))
    }
    for of, own, other in ((first, "1", "2"), (second, "2", "1")):
        assert set(pods_selected(of, pods[own]).values()) == {True}
        assert set(pods_selected(of, pods[other]).values()) == {False}, pods_selected(of, pods[other])
    for kind in set(first) & set(second):
        assert first[kind]["metadata"]["name"] != second[kind]["metadata"]["name"]
    scaled = second["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"]
    assert scaled == second["Deployment"]["metadata"]["name"]


def test_keda_takes_the_autoscalers_place(tmp_path: Path) -> None:
    base = by_kind(kustomized("base"))
    documents = overlay("For KEDA", tmp_path)
    assert set(documents) == set(base) - {"HorizontalPodAutoscaler"} | {"ScaledObject"}
    theirs, ours = base["HorizontalPodAutoscaler"]["spec"], documents["ScaledObject"]["spec"]
    assert ours["scaleTargetRef"]["name"] == theirs["scaleTargetRef"]["name"]
    assert (ours["minReplicaCount"], ours["maxReplicaCount"]) == (theirs["minReplicas"], theirs["maxReplicas"])
    assert ours["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == theirs["behavior"]
    for trigger, metric in zip(ours["triggers"], theirs["metrics"], strict=True):
        assert f'{metric["pods"]["metric"]["name"]}{{service="embert"}}' in trigger["metadata"]["query"]
        assert trigger["metadata"]["threshold"] == metric["pods"]["target"]["averageValue"]


def test_labels_and_selectors_meet() -> None:
    assert all(document["metadata"]["labels"] == LABELS for name, document in BASE.items() if name != "kustomization")
    pod = BASE["deployment"]["spec"]["template"]["metadata"]["labels"]
    assert pod == LABELS
    of = {document["kind"]: document for document in BASE.values()}
    assert set(pods_selected(of, pod).values()) == {True}
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


def test_what_is_scaled_on_are_metrics() -> None:
    documented = (ROOT / "docs" / "metrics.md").read_text()
    rules = yaml.safe_load((FOLDER / "monitoring" / "adapter-values.yaml").read_text())["rules"]["custom"]
    made = [rule["seriesQuery"].partition("{")[0] for rule in rules]
    scaled_on = [metric["pods"]["metric"]["name"] for metric in BASE["horizontalpodautoscaler"]["spec"]["metrics"]]
    assert scaled_on == made == ["embert_queue_tokens", "embert_engine_busy_ratio"]
    assert all(f"`{name}`" in documented for name in made)


def test_no_folder_of_a_pod_grows_without_bound() -> None:
    for volume in POD["volumes"]:
        assert volume["emptyDir"]["sizeLimit"], volume["name"]


def test_the_operators_rules_are_prometheus_rules() -> None:
    ours = yaml.safe_load((ROOT / "docker" / "prometheus" / "rules.yml").read_text())
    theirs = yaml.safe_load((FOLDER / "monitoring" / "prometheusrule.yaml").read_text())
    assert theirs["spec"] == ours, "run scripts/document"


def test_the_monitor_finds_the_service() -> None:
    monitor = yaml.safe_load((FOLDER / "monitoring" / "servicemonitor.yaml").read_text())["spec"]
    assert monitor["selector"]["matchLabels"] == NAME, "of all instances"
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in BASE["service"]["spec"]["ports"]}
    assert BASE["service"]["metadata"]["labels"][monitor["jobLabel"]] == "embert"


def test_yaml_files_hold_one_document_each() -> None:
    for path in Path(FOLDER).rglob("*.yaml"):
        assert len(list(yaml.safe_load_all(path.read_text()))) == 1, path
