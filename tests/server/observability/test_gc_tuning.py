"""Garbage collection in a process that serves requests: never over the objects of its start."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = """
import gc, json
from embert.server.observability import gc_tuning
generations = []
gc.callbacks.append(lambda phase, info: generations.append(info["generation"]) if phase == "start" else None)
gc_tuning.before_imports()
import embert.server.frontend.app  # seventy thousand objects, some of them cycles that nobody holds
full_collections = generations.count(2)
objects = len(gc.get_objects())
gc_tuning.after_startup()
print(json.dumps({
    "objects": objects, "frozen": gc.get_freeze_count(), "unfrozen": len(gc.get_objects()),
    "threshold": gc.get_threshold()[0], "full_collections": full_collections, "enabled": gc.isenabled(),
}))
"""


def test_objects_of_the_start_are_not_collected_again() -> None:
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    counts = json.loads(ran.stdout)
    assert counts["objects"] > 50_000
    assert counts["frozen"] > 0.6 * counts["objects"]
    assert counts["unfrozen"] < 1_000
    assert counts["full_collections"] == 0  # during imports
    assert counts["enabled"]
    assert 500 <= counts["threshold"] <= 5_000
