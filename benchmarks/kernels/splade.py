"""SPLADE's head beside the encoder that it follows, on the GPU: what the sparse vectors of a batch cost.

    python -m benchmarks.kernels.splade [--workloads passage query 1x32] [--pairs 200] [--rounds 5]

The encoder is BERT-base with random weights, timed as benchmarks.encoder.gpu times it. The head is timed as a CUDA
graph on random rows of the same lengths: all of it (transform, maxima, pairs), and the product with its maxima alone.
Random decoders make nearly every column of a text positive, which no model does, so their bias is lowered until a text
has about --pairs pairs. 0 leaves it at 0.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.encoder.cuda_process import CudaProcess
from benchmarks.encoder.gpu_workloads import lengths_of, model_folder, random_batch
from benchmarks.kernels.device_timer import Recorded, Timing
from benchmarks.lib import record

FLOAT16, FLOAT32, GELU = 1, 0, 1
HIDDEN = 768


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print, write."""
    options = _parser().parse_args(argv)
    timing = Timing(options.rest, options.rounds, sustained=False)
    with tempfile.TemporaryDirectory() as scratch:
        encoder = CudaProcess(model_folder("base", Path(scratch)), "mean")
        rows = [_measure(encoder, workload, options, timing) for workload in options.workloads]
        encoder.close()
    record.print_table(
        ["workload", "tokens", "texts", "encoder ms", "head ms", "of it maxima", "TFLOP/s", "pairs a text", "with it"],
        [
            [
                row["workload"],
                str(row["tokens"]),
                str(row["texts"]),
                *(f"{row[part]:.3f}" for part in ("encoder_ms", "head_ms", "maxima_ms")),
                f"{row['maxima_tflops']:.0f}",
                f"{row['pairs']:.0f}",
                f"{row['times']:.3f}x",
            ]
            for row in rows
        ],
    )
    path = record.write("splade", {"gpu": torch.cuda.get_device_name(), **vars(options), "rows": rows})
    print(f"\nwritten: {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.splade", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workloads", nargs="+", default=["passage", "query", "uniform512", "1x32", "1x128"])
    parser.add_argument("--vocabulary", type=int, default=30522)
    parser.add_argument("--pairs", type=int, default=200, help="of a text, about; 0: as many as random weights make")
    parser.add_argument("--rest", type=float, default=0.3, help="seconds before each burst")
    parser.add_argument("--rounds", type=int, default=5)
    return parser


def _measure(encoder: CudaProcess, workload: str, options: argparse.Namespace, timing: Timing) -> dict[str, Any]:
    lengths = lengths_of(workload)
    encoder_ms = float(np.median([encoder.ask("burst", random_batch(lengths)) for _ in range(options.rounds)]))
    head = _Head(lengths, options.vocabulary, 0.0)
    if options.pairs:
        values = np.sort(np.expm1(head.values()))[::-1]
        head = _Head(lengths, options.vocabulary, -float(values[min(options.pairs * len(lengths), len(values) - 1)]))
    head_us, maxima_us = Recorded(head.bench, head.run).us(timing), Recorded(head.bench, head.run_maxima).us(timing)
    tokens = int(lengths.sum())
    return {
        "workload": workload,
        "tokens": tokens,
        "texts": len(lengths),
        "encoder_ms": encoder_ms,
        "head_ms": head_us / 1e3,
        "maxima_ms": maxima_us / 1e3,
        "maxima_tflops": 2 * tokens * HIDDEN * options.vocabulary / maxima_us / 1e6,
        "pairs": len(head.values()) / len(lengths),
        "workspace_mb": head.head.workspace_bytes / 1e6,
        "times": (encoder_ms + head_us / 1e3) / encoder_ms,
    }


class _Head:
    """The head with random weights, and rows of these lengths."""

    def __init__(self, lengths: npt.NDArray[np.int64], vocabulary: int, shift: float) -> None:
        testing = importlib.import_module("embert.engine._cuda_testing")
        self.bench: Any = testing.Bench()
        self.bench.dependent_launch(True)
        random = np.random.default_rng(0)
        generator = torch.Generator("cuda").manual_seed(0)
        self.starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        self.rows, self.texts = int(lengths.sum()), len(lengths)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.float16, generator=generator)

        self._x, self._scratch = drawn(self.rows, HIDDEN), drawn(self.rows, HIDDEN)
        self._word = drawn(vocabulary, HIDDEN) * 0.02  # BERT's initializer_range
        self._bias = torch.full((vocabulary,), shift, device="cuda")
        self._cu_seqlens = torch.from_numpy(self.starts).cuda()
        text_of = np.repeat(np.arange(self.texts), lengths).astype(np.int32)
        self._text_of = torch.from_numpy(text_of).cuda()
        self.pitch = -(-vocabulary // testing.MAXIMA_COLUMNS) * testing.MAXIMA_COLUMNS
        torch.cuda.synchronize()
        self.head: Any = self.bench.splade("hopper", "", FLOAT16, HIDDEN, vocabulary, GELU, 1e-12, 1, True)
        for name, shape, scale, offset in (
            ("transform.weight", (HIDDEN, HIDDEN), 0.02, 0.0),
            ("transform.bias", (HIDDEN,), 0.02, 0.0),
            ("transform.gamma", (HIDDEN,), 0.1, 1.0),
            ("transform.beta", (HIDDEN,), 0.1, 0.0),
            ("decoder.bias", (vocabulary,), 0.0, shift),
        ):
            weight = (random.standard_normal(shape) * scale + offset).astype(np.float32)
            self.head.load(self.bench, name, weight.reshape(-1).view(np.uint8), list(shape), FLOAT32)
        self.head.prepare(self.bench, self._word.data_ptr(), self.rows, self.texts)
        self._product: Any = self.bench.maxima(
            "hopper", "", FLOAT16, self._word.data_ptr(), self._bias.data_ptr(), vocabulary, HIDDEN
        )
        self._maxima = torch.zeros(min(self.texts, self.head.texts_at_once), self.pitch, device="cuda")
        torch.cuda.synchronize()

    def run(self, _: int = 0) -> None:
        """Queue the whole head."""
        self.head.run(
            self.bench, self._x.data_ptr(), self._scratch.data_ptr(), self.rows, self.texts,
            self._cu_seqlens.data_ptr(), 0, self.starts, None,
        )  # fmt: skip

    def run_maxima(self, _: int = 0) -> None:
        """Queue the product with its maxima, over what the first run left; groups as the head makes them."""
        for first in range(0, self.texts, len(self._maxima)):
            begin, end = (int(self.starts[min(text, self.texts)]) for text in (first, first + len(self._maxima)))
            self._product.run(
                self.bench, self._scratch.data_ptr(), self._text_of.data_ptr(), self.rows, begin, end - begin, first,
                self._maxima.data_ptr(),
            )  # fmt: skip

    def values(self) -> npt.NDArray[np.float32]:
        """Return all values of a run."""
        self.run()
        self.bench.synchronize()
        complete, _, _, values = self.head.answer(self.texts)
        if complete < self.texts:
            print(f"only {complete} of {self.texts} texts' pairs fit")
        found: npt.NDArray[np.float32] = values
        return found


if __name__ == "__main__":
    main()
