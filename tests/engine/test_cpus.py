"""The number of CPUs that a container may use, from the kernel's files about cgroups."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from embert.engine import Model
from embert.engine.encoders.torch.encoder import TorchEncoder
from embert.engine.host import usable_cores, usable_cpus
from embert.server.config import ServeConfig

OVERLAY = "21 20 0:30 / / rw,relatime - overlay overlay rw,lowerdir=/a\n"
V2 = OVERLAY + "30 21 0:26 / /sys/fs/cgroup ro,nosuid shared:4 - cgroup2 cgroup rw,nsdelegate\n"
V1 = OVERLAY + "31 21 0:27 {} /sys/fs/cgroup/cpu,cpuacct ro,nosuid master:9 - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with 64 cores, all of which every container may run on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))


def files(root: Path, **texts: str) -> Path:
    """The files of `root` by name, in which `__` is a slash."""
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def cgroup_2(root: Path, group: str = "/", **limits: str) -> Path:
    files(root, proc__self__mountinfo=V2, proc__self__cgroup=f"0::{group}\n")
    for folder, limit in limits.items():
        files(root / "sys/fs/cgroup" / folder.strip("_"), **{"cpu.max": limit})
    return root


def cgroup_1(root: Path, quota: str, period: str, *, group: str = "/", mounted: str = "/", folder: str = "") -> Path:
    groups = f"4:memory:{group}\n3:cpu,cpuacct:{group}\n0::/\n"
    files(root, proc__self__mountinfo=V1.format(mounted), proc__self__cgroup=groups)
    limits = {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": period}
    files(root / "sys/fs/cgroup/cpu,cpuacct" / folder, **limits)
    return root


DOCKER = {"group": "/docker/1f/inner", "mounted": "/docker/1f", "folder": "inner"}  # the paths are the host's
CASES: list[tuple[Callable[[Path], Path], int]] = [
    (lambda root: cgroup_2(root, _="200000 100000\n"), 2),
    (lambda root: cgroup_2(root, _="250000 100000\n"), 2),
    (lambda root: cgroup_2(root, _="50000 100000\n"), 1),
    (lambda root: cgroup_2(root, _="9900000 100000\n"), 64),
    (lambda root: cgroup_2(root, _="max 100000\n"), 64),
    (lambda root: cgroup_2(root, "/pod/box", **{"pod": "400000 100000", "pod/box": "max 1", "other": "1 1"}), 4),
    (lambda root: files(cgroup_2(root, _="500000 100000"), proc__self__cgroup=""), 5),  # a kernel that names no cgroup
    (lambda root: cgroup_1(root, "200000\n", "100000\n"), 2),
    (lambda root: cgroup_1(root, "50000\n", "100000\n"), 1),
    (lambda root: cgroup_1(root, "-1\n", "100000\n"), 64),
    (lambda root: cgroup_1(root, "300000", "100000", **DOCKER), 3),
    (lambda root: cgroup_1(root, "300000", "100000", group="/kubepods/a", mounted="/docker/1f"), 3),
    (lambda root: root, 64),  # without cgroups the binding of the process counts
]


@pytest.mark.parametrize(("machine", "cpus"), CASES)
def test_usable_cpus(tmp_path: Path, machine: Callable[[Path], Path], cpus: int) -> None:
    assert usable_cpus(machine(tmp_path)) == cpus


def test_binding_below_the_quota_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert usable_cpus(cgroup_2(tmp_path, _="200000 100000")) == 1


def test_cores_follow_the_quota_their_siblings_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert usable_cores(tmp_path) == 64
    for cpu in range(64):  # two threads a core
        files(
            tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology", thread_siblings_list=f"{cpu % 32},{cpu % 32 + 32}"
        )
    assert usable_cores(tmp_path) == 32
    assert usable_cores(cgroup_2(tmp_path, _="200000 100000")) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert usable_cores(tmp_path) == 1


def test_encoder_and_the_http_processes_follow_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default_model: Model
) -> None:
    limited = cgroup_2(tmp_path, _="200000 100000")
    monkeypatch.setattr("embert.engine.encoders.cpu.encoder.usable_cores", lambda: usable_cores(limited))
    monkeypatch.setattr("embert.server.config.options.usable_cpus", lambda: usable_cpus(limited))
    assert TorchEncoder(default_model, max_batch_tokens=64)._threads == 2
    assert ServeConfig().http_processes == 1
