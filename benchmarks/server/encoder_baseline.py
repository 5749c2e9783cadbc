"""The encoder without a server, the baseline of the figures over HTTP. Its process ends before a server starts."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embert.engine import PackedBatch, Tokenizer, load_encoder, load_model, pack


@dataclass(frozen=True, slots=True)
class Baseline:
    """The encoder's own figures."""

    encoder: str
    device_name: str
    dtype: str
    max_batch_tokens: int
    texts_per_s: dict[str, float]  # by workload: full batches, two in flight, to vectors in host memory
    tokens_per_s: dict[str, float]
    batch_ms: dict[str, float]  # of one such batch
    one_text_ms: float  # p50 of batches of one text, one after the other

    def best(self, other: Baseline) -> Baseline:
        """Return the better of two measurements, figure by figure."""
        rates = [
            {kind: max(rate, b[kind]) for kind, rate in a.items()}
            for a, b in ((self.texts_per_s, other.texts_per_s), (self.tokens_per_s, other.tokens_per_s))
        ]
        batch_ms = {kind: min(ms, other.batch_ms[kind]) for kind, ms in self.batch_ms.items()}
        return replace(
            self,
            texts_per_s=rates[0],
            tokens_per_s=rates[1],
            batch_ms=batch_ms,
            one_text_ms=min(self.one_text_ms, other.one_text_ms),
        )


def measure(
    model: Path, device: str, workloads: Mapping[str, Sequence[str]], one: Sequence[str], seconds: float
) -> Baseline:
    """Measure each workload for `seconds`, and then the texts of `one` as batches of one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, str(model), device, workloads, one, seconds).result()


def _measure(
    folder: str, device: str, workloads: Mapping[str, Sequence[str]], one: Sequence[str], seconds: float
) -> Baseline:
    model = load_model(folder)
    tokenizer = Tokenizer(model)
    encoder = load_encoder(model, device=device)
    texts_per_s, tokens_per_s, batch_ms = {}, {}, {}
    for name, texts in workloads.items():
        batches = _full_batches(tokenizer, texts, encoder.max_batch_tokens)
        for batch in batches:
            encoder.encode(batch)
        sequences, tokens, count = 0, 0, 0
        began = time.perf_counter()
        flying = encoder.submit(batches[0])
        for batch, following in zip(cycle(batches), cycle(batches[1:] + batches[:1]), strict=False):
            ahead = encoder.submit(following)
            encoder.wait(flying)
            flying = ahead
            sequences, tokens, count = sequences + batch.sequences, tokens + batch.tokens, count + 1
            if time.perf_counter() - began > seconds:
                break
        took = time.perf_counter() - began
        encoder.wait(flying)
        texts_per_s[name], tokens_per_s[name], batch_ms[name] = sequences / took, tokens / took, took / count * 1e3
    singles = [_full_batches(tokenizer, [text], encoder.max_batch_tokens)[0] for text in one]
    times: list[float] = []
    until = time.perf_counter() + seconds
    for batch in cycle(singles):
        began = time.perf_counter()
        encoder.encode(batch)
        times.append(time.perf_counter() - began)
        if began > until:
            break
    facts = encoder.name, encoder.device_name, encoder.dtype, encoder.max_batch_tokens
    encoder.close()
    return Baseline(*facts, texts_per_s, tokens_per_s, batch_ms, statistics.median(times) * 1e3)


def _full_batches(tokenizer: Tokenizer, texts: Sequence[str], most_tokens: int) -> list[PackedBatch]:
    """Pack the texts in order into full batches; a partial last batch counts only if it is the only one."""
    encoded = tokenizer.encode(list(texts))
    batches: list[PackedBatch] = []
    sequences: list[npt.NDArray[np.int32]] = []
    tokens = first = 0
    for length in encoded.lengths.tolist():
        if tokens + length > most_tokens:
            batches.append(pack(sequences))
            sequences, tokens = [], 0
        sequences.append(encoded.ids[first : first + length])
        first, tokens = first + length, tokens + length
    return batches or [pack(sequences)]
