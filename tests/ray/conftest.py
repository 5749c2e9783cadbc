"""A cluster of several nodes on this machine, each a raylet with its workers, without internet and dashboard."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ray.doomed import FOLDER
from tests.server.live import ROOT

CPUS = 2  # of each node in Ray's books: as many of its workers start at a time
OBJECT_STORE_BYTES = 80_000_000  # of each node; Ray wants 75 MB
BUSY_S = 240  # what Ray waits for at most where it would give up on a busy machine
# Ray reads some of these when it is imported, which test files do.
os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # else a token is written into the home folder
    "RAY_worker_niceness": "0",  # of 15: next to other work they would hardly get a core
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_DATA_PARQUET_FOOTER_NUM_ACTORS": "1",  # a process each, for two files
    # A node that was killed refuses connections and is found dead after five periods; a busy one has time to respond.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": f"{BUSY_S * 1000}",
    "RAY_worker_register_timeout_seconds": f"{BUSY_S}",
    "RAY_agent_register_timeout_ms": f"{BUSY_S * 1000}",
    "RAY_gcs_server_request_timeout_seconds": f"{BUSY_S}",
    "RAY_gcs_server_port_wait_time_s": f"{BUSY_S}",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": f"{BUSY_S}",
    # On a busy machine a proxy takes longer than 5 s to start; Ray Serve would kill it and begin again.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": f"{BUSY_S}",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": f"{BUSY_S}",
}


@dataclass
class LocalCluster:
    """The cluster, and a folder that its workers see too."""

    nodes: Any  # ray.cluster_utils.Cluster
    folder: Path

    def add_node(self, **resources: float) -> Any:
        """A node that has these, too."""
        return self.nodes.add_node(num_cpus=CPUS, resources=resources, object_store_memory=OBJECT_STORE_BYTES)

    def connect(self) -> None:
        import ray

        if not ray.is_initialized():
            logs = bool(os.environ.get("EMBERT_TEST_RAY_LOG"))
            ray.init(self.nodes.address, log_to_driver=logs, logging_level=logging.WARNING)

    def kill(self, node: Any) -> None:
        """End a node as a machine ends whose power fails: the raylet and every worker, by SIGKILL."""
        for each in family(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.nodes.remove_node(node, allow_graceful=False)


def family(node: Any) -> list[psutil.Process]:
    """The processes of a node."""
    found = []
    for processes in node.all_processes.values():
        for each in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(each.process.pid)
                found += [parent, *parent.children(recursive=True)]
    return found


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two nodes; tests that lose one add another first."""
    pytest.importorskip("ray", reason="ray is an extra")
    folder = tmp_path_factory.mktemp("cluster")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        patch.setenv("PYTHONPATH", str(ROOT))  # where workers find tests.ray.doomed
        import ray
        from ray.cluster_utils import Cluster

        # With another folder, a cluster does not make the one in which Ray notes the address of the last cluster.
        Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
        short = tempfile.mkdtemp(prefix="ray-")  # paths of sockets have at most 107 bytes
        head = {
            "num_cpus": CPUS,
            "num_gpus": 2,  # in Ray's books alone
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "temp_dir": short,
        }
        nodes: Any = Cluster(initialize_head=True, head_node_args=head)
        members: set[psutil.Process] = set()
        try:
            made = LocalCluster(nodes, folder)
            made.add_node(embedder=1)
            made.connect()
            yield made
        finally:
            for node in nodes.list_all_nodes():
                members |= set(family(node))
            ray.shutdown()
            nodes.shutdown()
            for each in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            shutil.rmtree(short, ignore_errors=True)
