"""The reference implementation for CPUs, with torch's operators only."""

from __future__ import annotations

import os

# torch reads both when it is imported. Threads of its loops should spin only for the microseconds between two loops.
# With the default they starved every other process on the same cores, and each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
