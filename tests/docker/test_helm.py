"""The Helm chart: its values against their schema, what it renders against Kubernetes' schemas and the image."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from embert.server.config import ServeConfig, environment_name
from embert.server.frontend.routes import METRIC_ROUTES
from tests.docker.dockerfile import stages
from tests.docker.manifests import CHART, Manifest, by_kind, check, helm, templated
from tests.server.live import ROOT

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
WATCHED = ("monitoring.serviceMonitor=true", "monitoring.rules=true")
EVERYTHING = (
    *WATCHED,
    "monitoring.dashboard=true",
    "model=some/model",
    "image.tag=v7",
    "imagePullSecrets[0].name=registry",
    "runtimeClassName=nvidia",
    "hubToken.secret=hub",
    "apiKeys.secret=clients",
    "models.existingClaim=shared",
    "options.EMBERT_MAX_QUEUE_TOKENS=16384000",
    "options.EMBERT_MAX_QUEUE_SECONDS=0.5",
    "options.EMBERT_LOG_FORMAT=text",
    "service.annotations.a=b",
    "networkPolicy.from[0].podSelector.matchLabels.app=search",
    "podLabels.team=search",
    "podAnnotations.note=x",
    "nodeSelector.zone=a",
    "tolerations[0].operator=Exists",
    "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchFields[0].key=a",
    "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].matchFields[0].operator=In",
    "extraEnv[0].name=HF_HUB_OFFLINE",
    "extraEnv[0].value=one",
    "serviceAccountName=search",
    "priorityClassName=high",
)
VARIANTS = {
    "gpu": (),
    "cpu": ("gpu.enabled=false",),
    "keda": ("autoscaling.kind=keda",),
    "fixed": (
        "autoscaling.kind=none",
        "replicas=3",
        "podDisruptionBudget.enabled=false",
        "networkPolicy.enabled=false",
    ),
    "everything": EVERYTHING,
    "models": ("modelsFile=[[models]]\nmodel = 'a'\n",),
}


def container(deployment: Manifest) -> dict[str, Any]:
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(only)


# --- without helm ---


def test_the_schema_knows_the_values_and_no_others() -> None:
    jsonschema.validate(VALUES, SCHEMA)

    def same(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> None:
        assert schema["additionalProperties"] is False, path
        assert set(values) == set(schema["properties"]) - {"global"}, path
        for name, each in schema["properties"].items():
            if "properties" in each and values.get(name):
                same(values[name], each, f"{path}.{name}")

    same(VALUES, SCHEMA)


def test_the_drain_is_the_servers() -> None:
    assert VALUES["drainTimeout"] == ServeConfig().drain_timeout


# --- with it ---


def test_lint_finds_nothing() -> None:
    ran = helm("lint", "--strict", str(CHART))
    assert ran.returncode == 0, ran.stdout
    assert "0 chart(s) failed" in ran.stdout
    assert "[WARNING]" not in ran.stdout


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_kubernetes_knows_every_field(settings: tuple[str, ...]) -> None:
    manifests = templated(*settings)
    assert len(manifests) >= 3
    for manifest in manifests:
        check(manifest)
        labels = manifest["metadata"]["labels"]
        assert labels.items() >= {"app.kubernetes.io/name": "embert", "app.kubernetes.io/instance": "embert"}.items()


def test_ports_and_probes_are_the_servers() -> None:
    of = by_kind(templated())
    only = container(of["Deployment"])
    ports = {port["name"]: port["containerPort"] for port in only["ports"]}
    assert ports == {"http": ServeConfig().port, "metrics": int(of["ConfigMap"]["data"]["EMBERT_METRICS_PORT"])}
    assert {port["targetPort"] for port in of["Service"]["spec"]["ports"]} == set(ports)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert only[probe]["httpGet"]["path"] in METRIC_ROUTES
        assert only[probe]["httpGet"]["port"] == "http"


def test_the_pod_may_do_no_more_than_the_image_needs() -> None:
    deployment = by_kind(templated())["Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (user,) = stages()["runtime"].all("USER")
    context = pod["securityContext"]
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == user.value
    assert context["runAsNonRoot"]
    assert container(deployment)["securityContext"]["readOnlyRootFilesystem"]
    assert all(volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"]), "or a pod fills the node's disk"
    assert pod["enableServiceLinks"] is False, "EMBERT_PORT=tcp://… of the service would be taken for an option"


def test_the_grace_period_covers_the_drain() -> None:
    of = by_kind(templated("preStopSleep=7", "drainTimeout=50"))
    pod = of["Deployment"]["spec"]["template"]["spec"]
    assert container(of["Deployment"])["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert of["ConfigMap"]["data"]["EMBERT_DRAIN_TIMEOUT"] == "50"
    assert pod["terminationGracePeriodSeconds"] >= 7 + 50 + 5


def test_everything_arrives_where_it_belongs() -> None:
    of = {f"{each['kind']} {each['metadata']['name']}": each for each in templated(*EVERYTHING)}
    pod = of["Deployment embert"]["spec"]["template"]["spec"]
    (only,) = pod["containers"]
    assert only["image"] == "ghcr.io/embert/embert:v7"
    assert (pod["runtimeClassName"], pod["serviceAccountName"], pod["priorityClassName"]) == (
        "nvidia",
        "search",
        "high",
    )
    token, extra = only["env"]
    assert token == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert extra == {"name": "HF_HUB_OFFLINE", "value": "one"}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "shared"}
    assert volumes["keys"]["secret"] == {"secretName": "clients"}
    mounts = {mount["name"]: mount["mountPath"] for mount in only["volumeMounts"]}
    options = of["ConfigMap embert"]["data"]
    assert options == {
        "EMBERT_METRICS_PORT": "9090",
        "EMBERT_DRAIN_TIMEOUT": "30",
        "EMBERT_MODEL": "some/model",
        "EMBERT_API_KEY_FILE": f"{mounts['keys']}/keys",
        "EMBERT_MAX_QUEUE_TOKENS": "16384000",
        "EMBERT_MAX_QUEUE_SECONDS": "0.5",
        "EMBERT_LOG_FORMAT": "text",
    }
    assert set(options) <= {environment_name(name) for name in ServeConfig.__dataclass_fields__}
    assert mounts["models"] == stages()["runtime"].all("VOLUME")[0].value
    assert of["Deployment embert"]["spec"]["template"]["metadata"]["labels"]["team"] == "search"
    assert len(pod["tolerations"]) == 2


def test_tls_has_its_files_and_probes() -> None:
    settings = (
        "options.EMBERT_SSL_CERTFILE=/certs/tls.crt",
        "extraVolumes[0].name=certs",
        "extraVolumes[0].secret.secretName=search-tls",
        "extraVolumeMounts[0].name=certs",
        "extraVolumeMounts[0].mountPath=/certs",
    )
    of = by_kind(templated(*settings))
    check(of["Deployment"])
    pod = of["Deployment"]["spec"]["template"]["spec"]
    probes = [value["httpGet"] for name, value in pod["containers"][0].items() if name.endswith("Probe")]
    assert [each["scheme"] for each in probes] == ["HTTPS"] * 3
    assert {"name": "certs", "secret": {"secretName": "search-tls"}} in pod["volumes"]
    assert {"name": "certs", "mountPath": "/certs"} in pod["containers"][0]["volumeMounts"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("modle=x", "modle"),
        ("gpu.count=0", "gpu.count"),
        ("options.port=3", '"port"'),
        ("autoscaling.kind=vpa", "autoscaling.kind"),
        ("models.sizeLimit=large", "models.sizeLimit"),
        (
            "options.EMBERT_MAX_BATCH_TOKEN=3",
            "EMBERT_MAX_BATCH_TOKEN is not an option of embert serve; did you mean EMBERT_MAX_BATCH_TOKENS?",
        ),
        ("options.EMBERT_REQUEST_TIME_OUT=3", "did you mean EMBERT_REQUEST_TIMEOUT?"),
        ("options.EMBERT_NONSENSE=3", "options.EMBERT_NONSENSE is not an option of embert serve"),
        ("options.EMBERT_SSL_CA_CERTS=/ca.pem", "options.EMBERT_SSL_CA_CERTS cannot be set"),
        ("options.EMBERT_KEYLESS=none", "EMBERT_KEYLESS is none"),
        ("extraEnv[0].name=EMBERT_KEYLESS,extraEnv[0].value=none", "EMBERT_KEYLESS is none"),
        (f"fullnameOverride={'a' * 254}", "fullnameOverride"),
        (f"extraVolumes[0].name={'a' * 64}", "name"),
        (f"podLabels.team={'a' * 64}", "podLabels"),
        ("extraVolumeMounts[0].name=x", "mountPath"),
        ("options.EMBERT_PORT=3", "options.EMBERT_PORT cannot be set: the chart decides it"),
        ("options.EMBERT_MODEL=x", "options.EMBERT_MODEL cannot be set: use the value model"),
        ("options.EMBERT_CONFIG=x", "options.EMBERT_CONFIG cannot be set: use the value modelsFile"),
        (
            "autoscaling.minReplicas=9",
            "autoscaling.minReplicas is 9, above autoscaling.maxReplicas, which is 8",
        ),
        (
            "rollout.maxUnavailable=0",
            "rollout.maxSurge is 0 and rollout.maxUnavailable is 0: one of them must be above 0",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(settings: str, said: str) -> None:
    ran = helm("template", "x", str(CHART), "--kube-version=1.31.0", f"--set={settings}")
    assert ran.returncode != 0
    assert said in ran.stderr.replace("/", "."), ran.stderr  # helm 4 writes paths with slashes


def test_the_documented_releases_render() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    commands = re.findall(r"^\$ helm install (\w+) docker/helm/embert (.+)$", page, re.MULTILINE)
    assert len(commands) == 3
    for release, words in commands:
        settings = [word for word in words.split() if word != "--set"]
        for manifest in templated(*settings, release=release):
            check(manifest)
    section = page.partition("## Kubernetes")[2].partition("\n### ")[0]
    settings = re.findall(r"`((?:\w+\.)?\w+=[^`]+)`", section)
    assert len(settings) >= 7
    assert templated(*settings)
