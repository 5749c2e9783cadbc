"""Manifests for Kubernetes: rendered, looked up by kind, validated, and matched with pods."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from tests.server.live import ROOT

Manifest = dict[str, Any]
CHART = ROOT / "docker" / "helm" / "embert"
CUSTOM = ("monitoring.coreos.com/", "keda.sh/")  # kinds of operators, which Kubernetes' own schemas lack


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm, or skip where there is none."""
    command = shutil.which("helm") or shutil.which("helm", path=ROOT / "build" / "tools" / "node_modules" / ".bin")
    if command is None:
        pytest.skip("needs helm: https://helm.sh/docs/intro/install")
    return subprocess.run([command, *arguments], capture_output=True, text=True, check=False)


def templated(*settings: str, release: str = "embert", namespace: str = "search") -> list[Manifest]:
    """Manifests that `helm install` sends with these values of `--set`."""
    words = [f"--set={setting}" for setting in settings]
    # helm takes the cluster's version from itself where there is no cluster; an old helm's is too old for the chart.
    made = helm("template", release, str(CHART), f"--namespace={namespace}", "--kube-version=1.31.0", *words)
    assert made.returncode == 0, made.stderr
    return list(filter(None, yaml.load_all(made.stdout, _Strict)))


class _Strict(yaml.SafeLoader):
    """Refuses a key that is there twice, as Kubernetes does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"{node.start_mark}: twice the same key: {keys}"
        return super().construct_mapping(node, deep)


def check(manifest: Manifest) -> None:
    """Validate it against Kubernetes' schema, unless an operator brings its kind."""
    if not manifest["apiVersion"].startswith(CUSTOM):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def by_kind(manifests: list[Manifest]) -> dict[str, Manifest]:
    """One of each kind; AssertionError if there are two."""
    found = {manifest["kind"]: manifest for manifest in manifests}
    assert len(found) == len(manifests)
    return found
