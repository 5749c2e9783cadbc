"""How many CPUs a container may use, read from the files that the kernel shows of cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from embert.engine import Model
from embert.engine.encoders.cpu.encoder import TorchEncoder
from embert.engine.host import usable_cpus
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


@pytest.mark.parametrize(
    ("limit", "cpus"),
    [
        ("200000 100000\n", 2),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("30000 10000\n", 3),
        ("9900000 100000\n", 64),
        ("max 100000\n", 64),
    ],
)
def test_a_quota_of_cgroup_2(tmp_path: Path, limit: str, cpus: int) -> None:
    assert usable_cpus(cgroup_2(tmp_path, _=limit)) == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("200000\n", 2), ("50000\n", 1), ("-1\n", 64)])
def test_a_quota_of_cgroup_1(tmp_path: Path, quota: str, cpus: int) -> None:
    assert usable_cpus(cgroup_1(tmp_path, quota, "100000\n")) == cpus


def test_the_narrowest_cgroup_counts(tmp_path: Path) -> None:
    limits = {"pod": "400000 100000", "pod/container": "max 100000", "other": "100000 100000"}
    assert usable_cpus(cgroup_2(tmp_path, "/pod/container", **limits)) == 4


def test_a_mount_that_shows_a_part_of_the_hosts_tree(tmp_path: Path) -> None:
    """As Docker makes it with cgroup v1: the paths are the host's, and the container's own cgroup is mounted."""
    limited = cgroup_1(tmp_path, "300000", "100000", group="/docker/1f/inner", mounted="/docker/1f", folder="inner")
    assert usable_cpus(limited) == 3


def test_a_path_of_another_namespace(tmp_path: Path) -> None:
    assert usable_cpus(cgroup_1(tmp_path, "300000", "100000", group="/kubepods/a", mounted="/docker/1f")) == 3


def test_a_kernel_that_names_no_cgroup(tmp_path: Path) -> None:
    files(cgroup_2(tmp_path, _="500000 100000"), proc__self__cgroup="")
    assert usable_cpus(tmp_path) == 5


def test_without_cgroups_what_the_process_is_bound_to_counts(tmp_path: Path) -> None:
    assert usable_cpus(tmp_path) == 64


def test_a_binding_below_the_quota_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert usable_cpus(cgroup_2(tmp_path, _="200000 100000")) == 1


def test_the_cpu_encoder_and_the_http_processes_follow_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default_model: Model
) -> None:
    limited = cgroup_2(tmp_path, _="200000 100000")
    for module in ("embert.engine.encoders.cpu.encoder", "embert.server.config.options"):
        monkeypatch.setattr(f"{module}.usable_cpus", lambda: usable_cpus(limited))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(64)  # what torch takes on such a node
        assert TorchEncoder(default_model, max_batch_tokens=64)._threads == 2
    finally:
        torch.set_num_threads(before)
    assert ServeConfig().http_processes == 1
