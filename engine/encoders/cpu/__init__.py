"""The CPU encoder, in torch. It computes any `EncoderConfig`, and is the reference that other encoders compare with."""

from __future__ import annotations

import os

# torch reads both when it is imported. A batch of one run uses torch's loops, whose threads should spin only
# for the microseconds between two loops. Without spinning (0) a second core gained nothing. With the default,
# threads starved every process, and each other: one text next to another busy process took 460 ms instead of 4.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
