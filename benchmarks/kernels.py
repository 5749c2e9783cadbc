"""Each kernel of the CUDA encoder against its floor: bytes at the copy's speed, or FLOPs at the largest product's.

    python -m benchmarks.kernels [--tokens 16384] [--hidden 768] [--inner 3072] [--heads 12] [--length 128]

Times are of replayed CUDA graphs of ten launches; ten sets of inputs rotate, so that the cache holds none of them. The
ceilings are measured in the same run: a copy on the device, and the fastest of the matrix products listed.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import record
from engine.encoders.cuda import _cublaslt_library

FLOAT16 = 1
GELU = 1
SETS = 10


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernels")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--inner", type=int, default=3072)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--length", type=int, default=128)
    options = parser.parse_args(argv)
    cuda = importlib.import_module("engine._cuda")
    bench = cuda.testing.Bench()
    tokens, hidden, inner, heads, length = vars(options).values()
    is_hopper = cuda.device_info(0)[1] == 90
    random = np.random.default_rng(0)

    def filled(*shape: int, scale: float = 1.0) -> int:
        return upload((random.standard_normal(shape) * scale).astype(np.float16))

    def upload(array: np.ndarray[Any, Any]) -> int:
        address = int(bench.allocate(array.nbytes))
        bench.upload(address, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return address

    def timed(launch: Callable[[int], None]) -> float:
        """Microseconds a launch; `launch` is given the number of the set to use."""
        bench.begin_recording()
        for i in range(SETS):
            launch(i)
        bench.end_recording()
        return float(statistics.median(bench.replay(20))) / SETS * 1e3

    wide = max(3 * hidden, inner)
    big = [filled(tokens, wide) for _ in range(SETS)]
    small = [filled(tokens, hidden) for _ in range(SETS)]
    out = [int(bench.allocate(2 * tokens * wide)) for _ in range(SETS)]
    vector = filled(wide)
    copied = 2 * tokens * wide
    bytes_a_us = 2 * copied / timed(lambda i: bench.copy(out[i], big[i], copied))

    sequences = tokens // length
    starts = np.arange(sequences) * length
    cu_seqlens = upload(np.append(starts, sequences * length).astype(np.int32))
    tiles = np.array(
        [(s, length, q, 0) for s in starts for q in range(0, length, 64 if length > 32 else length)], np.int32
    )
    work = upload(tiles)
    lists = (work, len(tiles), 0, 0) if length > 32 else (0, 0, work, len(tiles))
    cuts = upload(np.zeros(sequences, np.uint32))
    positions = upload((np.arange(tokens) % length).astype(np.int32))
    ids = upload(random.integers(0, 30000, tokens).astype(np.int32))
    zeros = upload(np.zeros(tokens, np.int32))
    words, places, kinds = filled(30000, hidden), filled(512, hidden), filled(2, hidden)
    vectors = int(bench.allocate(4 * sequences * hidden))

    rows: list[dict[str, Any]] = []

    def add(name: str, us: float, moved: float, flops: float = 0.0) -> None:
        rows.append({"kernel": name, "us": us, "bytes": moved, "flops": flops})

    add(
        "embedding + LayerNorm",
        timed(
            lambda i: bench.embed(
                FLOAT16, words, places, kinds, vector, vector, ids, zeros, positions, tokens, hidden, 1e-12, out[i], 0
            )
        ),
        4 * tokens * hidden,
    )
    add(
        "LayerNorm",
        timed(lambda i: bench.layernorm(FLOAT16, small[i], 0, 0, vector, vector, tokens, hidden, 1e-12, out[i])),
        4 * tokens * hidden,
    )
    add("GELU", timed(lambda i: bench.activate(FLOAT16, GELU, 0, tokens, inner, out[i])), 4 * tokens * inner)
    add(
        f"attention, length {length}",
        timed(lambda i: bench.attention(FLOAT16, big[i], tokens, *lists, heads, hidden // heads, out[i], is_hopper)),
        8 * tokens * hidden,
        4.0 * tokens * length * hidden,
    )
    add(
        "mean pooling",
        timed(lambda i: bench.pool(FLOAT16, 1, small[i], cu_seqlens, cuts, sequences, hidden, vectors)),
        2 * tokens * hidden,
    )
    for name, columns, depth, kind, has_residual in (
        ("QKV", 3 * hidden, hidden, 0, False),
        ("attention out + residual", hidden, hidden, 0, True),
        ("FFN in + GELU", inner, hidden, GELU, False),
        ("FFN out + residual", hidden, inner, 0, True),
    ):
        weight = filled(columns, depth, scale=depth**-0.5)
        x = small if depth == hidden else big
        for provider in ("hopper", "cublaslt"):
            try:
                made = bench.product(provider, _cublaslt_library(), FLOAT16, weight, vector, columns, depth, kind)
                run = _product(made, bench, x, small if has_residual else [0] * SETS, tokens, out)
                run(0)
                us = timed(run)
            except RuntimeError as error:
                print(f"{provider}: {error}")
                continue
            moved = 2 * tokens * (depth + columns * (2 if has_residual else 1)) + 2 * columns * depth
            add(f"{name} ({provider})", us, moved, 2.0 * tokens * columns * depth)
    peak = max(row["flops"] / row["us"] for row in rows)

    print(f"copy: {bytes_a_us / 1e6:.2f} TB/s; fastest product here: {peak / 1e6:.0f} TFLOP/s\n")
    for row in rows:
        row["floor_us"] = max(row["bytes"] / bytes_a_us, row["flops"] / peak)
    record.print_table(
        ["kernel", "us", "floor us", "times the floor", "TB/s", "TFLOP/s"],
        [
            [
                row["kernel"],
                f"{row['us']:.1f}",
                f"{row['floor_us']:.1f}",
                f"{row['us'] / row['floor_us']:.2f}",
                f"{row['bytes'] / row['us'] / 1e6:.2f}",
                f"{row['flops'] / row['us'] / 1e6:.0f}",
            ]
            for row in rows
        ],
    )
    figures = {
        "gpu": cuda.device_info(0)[0],
        **vars(options),
        "copy_tb_a_s": bytes_a_us / 1e6,
        "rows": rows,
    }
    print(f"\nwritten: {record.write('kernels', figures)}")


def _product(
    made: Any, bench: Any, x: Sequence[int], residual: Sequence[int], tokens: int, out: Sequence[int]
) -> Callable[[int], None]:
    return lambda i: made.run(bench, x[i], residual[i], tokens, out[i])


if __name__ == "__main__":
    main()
