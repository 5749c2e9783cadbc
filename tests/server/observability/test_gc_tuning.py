"""Garbage collection in a process that answers requests: never over what it started with."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = """
import gc, json
from embert.server.observability import gc_tuning
while_importing = []
gc.callbacks.append(lambda phase, about: while_importing.append(about["generation"]) if phase == "start" else None)
gc_tuning.before_imports()
import embert.server.frontend.app  # seventy thousand objects, some of them cycles that nobody holds
oldest = while_importing.count(2)
made = len(gc.get_objects())
gc_tuning.after_startup()
print(json.dumps({
    "made": made, "frozen": gc.get_freeze_count(), "looked_at": len(gc.get_objects()),
    "young": gc.get_threshold()[0], "oldest": oldest, "enabled": gc.isenabled(),
}))
"""


def test_what_a_process_starts_with_is_not_looked_at_again() -> None:
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    told = json.loads(ran.stdout)
    assert told["made"] > 50_000
    assert told["frozen"] > 0.6 * told["made"]
    assert told["looked_at"] < 1_000
    assert told["oldest"] == 0  # while importing, nobody looks at everything
    # What comes later is looked at, in small portions.
    assert told["enabled"]
    assert 500 <= told["young"] <= 5_000
