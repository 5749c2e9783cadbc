"""What oneDNN's own log says of the kernels that a program makes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.server.live import ROOT

__all__ = ["check_no_kernel_is_made_after_loading"]


def check_no_kernel_is_made_after_loading(program: str, *arguments: str) -> None:
    """`program` prints "loaded", encodes, and prints "encoded". Skips where oneDNN has no part in that."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        pytest.skip("this torch has no oneDNN")
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=os.environ | {"ONEDNN_VERBOSE": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    loading, _, encoding = f"\n{done.stdout}".partition("\nloaded\n")  # oneDNN may have said nothing before
    assert "encoded" in encoding
    if "inner_product" not in loading:
        pytest.skip("oneDNN's packed products do not work on this machine")
    assert "inner_product" in encoding
    assert "create:cache_miss" not in encoding
