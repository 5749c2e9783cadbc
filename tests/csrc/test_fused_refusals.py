"""Turned columns and gates that Hopper's products refuse while a model is loaded."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.csrc.host_program import build


def test_what_cannot_be_fused_is_refused_by_name(tmp_path: Path) -> None:
    program = build(tmp_path, Path(__file__).with_name("fused_refusals.cpp"))
    told = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    message = "hopper gemm: {} RoPE columns of heads of {}, in {} of 2304"
    assert told == [
        "fine",
        "fine",
        "fine",
        "hopper gemm: gates and a residual",
        "hopper gemm: gates without an activation",
        "hopper gemm: SiLU without gates",
        "hopper gemm: RoPE columns and an activation, gates or a residual",
        "hopper gemm: RoPE columns and an activation, gates or a residual",
        "fine",
        "fine",
        message.format(20, 20, 1520),
        message.format(33, 64, 1536),
        message.format(66, 64, 1536),
        message.format(64, 64, 1500),
        message.format(64, 64, 2368),
        message.format(64, 64, 1536),
    ]
