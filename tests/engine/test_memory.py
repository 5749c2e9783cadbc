"""Sizes of models: memory that they need, next to the machine's, and FLOPs of their layers by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from embert.engine import load_model
from embert.engine.host import usable_memory
from embert.engine.memory_estimate import MIB, estimate_memory, process_bytes
from embert.engine.models.encoder_config import Attention, Convolution
from embert.engine.models.flops import attention_flops, product_flops
from tests.engine.test_cpus import OVERLAY, V2, files

GIB = 1 << 30


def machine(root: Path, **limits: str) -> Path:
    """A host of 64 GiB, and cgroups of version 2 with these limits."""
    files(root, proc__meminfo="MemTotal:       67108864 kB\nMemFree:        1 kB\n")
    files(root, proc__self__mountinfo=V2, proc__self__cgroup="0::/pod/box\n")
    for folder, limit in limits.items():
        files(root / "sys/fs/cgroup" / folder.replace("__", "/"), **{"memory.max": limit})
    return root


@pytest.mark.parametrize(
    ("limits", "usable"),
    [
        ({}, 64 * GIB),
        ({"pod__box": f"{3 * GIB}\n"}, 3 * GIB),
        ({"pod__box": "max\n", "pod": f"{5 * GIB}\n"}, 5 * GIB),
        ({"pod__box": f"{500 * GIB}\n"}, 64 * GIB),
    ],
)
def test_least_limit_counts(tmp_path: Path, limits: dict[str, str], usable: int) -> None:
    assert usable_memory(machine(tmp_path, **limits)) == usable


def test_older_version_of_cgroups(tmp_path: Path) -> None:
    mount = OVERLAY + "31 21 0:27 / /sys/fs/cgroup/memory ro,nosuid master:9 - cgroup cgroup rw,memory\n"
    files(tmp_path, proc__self__mountinfo=mount, proc__self__cgroup="4:memory:/box\n3:cpu,cpuacct:/box\n")
    files(tmp_path / "sys/fs/cgroup/memory/box", **{"memory.limit_in_bytes": f"{2 * GIB}\n"})
    assert usable_memory(tmp_path) == 2 * GIB


def test_machine_that_says_nothing_has_no_limit(tmp_path: Path) -> None:
    assert usable_memory(tmp_path) is None


def test_sizes_of_the_default_model() -> None:
    model = load_model()
    gpu = estimate_memory(model, device="cuda:0")
    assert round(gpu.weights / MIB) == 43
    assert gpu.activations / MIB == pytest.approx(106, rel=0.03)
    assert round(gpu.loading / MIB) == 24
    cpu = estimate_memory(model, device="cpu")
    assert round(cpu.weights / MIB) == 86
    assert (cpu.resident + process_bytes("cpu")) / MIB == pytest.approx(270, rel=0.1)
    assert estimate_memory(model, device="cuda", dtype="float32").weights == 2 * gpu.weights
    assert estimate_memory(model, device="cuda", max_batch_tokens=1024).activations * 16 == gpu.activations


def test_eight_bits_on_a_gpu_take_rows_of_integers() -> None:
    model = load_model()
    float16, int8 = (
        estimate_memory(model, device="cuda", dtype=dtype, max_batch_tokens=2048).activations
        for dtype in ("float16", "int8")
    )
    assert int8 - float16 == 2048 * (1536 + 4)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_the_keys_that_a_query_sees(causal: bool) -> None:
    windows = [None, 0, 1, 5]
    config = replace(
        load_model().config, layers=4, attention=tuple(Attention(window=each) for each in windows), causal=causal
    )
    lengths = [1, 2, 6, 7, 20]
    pairs = [
        sum(
            (window is None or abs(query - key) <= window) and not (causal and key > query)
            for window, query, key in product(windows, range(length), range(length))
        )
        for length in lengths
    ]
    expected = np.array(pairs) * 2 * 2 * config.heads * config.head_size
    np.testing.assert_array_equal(attention_flops(config, np.array(lengths)), expected)


def test_products_are_those_of_the_weights() -> None:
    """MiniLM-L6; then heads of 64 columns that share keys and values by four, and gates."""
    config = load_model().config
    assert product_flops(config) == 2 * 6 * (4 * 384 * 384 + 2 * 384 * 1536)
    shared = replace(config, head_columns=64, key_value_heads=3, gated=True)
    assert product_flops(shared) == 2 * 6 * 384 * (2 * 12 * 64 + 2 * 3 * 64 + 3 * 1536)
    kinds = (Attention(head_columns=64, key_value_heads=3), Attention(convolution=Convolution(3)))
    mixed = replace(config, attention=kinds * 3, layer_inputs=10)
    columns = 2 * 12 * 64 + 2 * 3 * 64 + 4 * 384 + 2 * (2 * 1536 + 3 * 10)
    assert product_flops(mixed) == 2 * 3 * 384 * columns
    pairs = 3 * 9 * 9  # of tokens in the layers with attention
    np.testing.assert_array_equal(attention_flops(mixed, np.array([9])), [2 * 2 * 12 * 64 * pairs])
