"""SPLADE's head: maxima over texts, the pairs made of them, and the whole head, each against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from embert.engine.encoders.cuda.encoder import _cublaslt_library
from tests.csrc import reference as ref
from tests.csrc.device import Device

pytestmark = pytest.mark.gpu

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]

LENGTHS = [1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 512]  # the last ones span several tiles of 128 rows
NO_TEXT = -1
TILE, PIECE = 128, 1024  # columns
CASES = [
    ("hopper", ref.FLOAT16), ("hopper", ref.BFLOAT16),
    ("cublaslt", ref.FLOAT16), ("cublaslt", ref.BFLOAT16), ("cublaslt", ref.FLOAT32),
]  # fmt: skip
SHAPES = [(30522, 768), (50265, 384), (1000, 312), (128, 64)]  # vocabulary, hidden


def pitch_of(columns: int) -> int:
    return -(-columns // TILE) * TILE


def starts_of(lengths: list[int]) -> Integers:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def texts_of(lengths: list[int]) -> Integers:
    return np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)


def largest(x: ref.Doubles, weight: ref.Doubles, bias: ref.Doubles, lengths: list[int]) -> ref.Doubles:
    """max(0, x·Wᵀ + bias) over the rows of each text, [texts, columns]; some columns at a time."""
    starts, parts = starts_of(lengths)[:-1], []
    for first in range(0, len(weight), 8192):
        part = slice(first, first + 8192)
        logits = (torch.from_numpy(x) @ torch.from_numpy(weight[part]).T).numpy() + bias[part]
        parts.append(np.maximum.reduceat(logits, starts, axis=0))
    maxima: ref.Doubles = np.maximum(np.concatenate(parts, axis=1), 0)
    return maxima


class Product:
    """A decoder on the device, and maxima of any rows."""

    def __init__(self, device: Device, random: np.random.Generator, provider: str, dtype: int, out: int, width: int):
        self.weight = ref.stored(random.standard_normal((out, width)) / np.sqrt(width), dtype)
        bias = random.standard_normal(out) - 1
        if provider == "cublaslt":  # adds what its type holds
            bias = ref.exact(ref.stored(bias, dtype))
        self.bias = bias.astype(np.float32)
        self.device, self.out, self.pitch = device, out, pitch_of(out)
        try:
            self.product: Any = device.launch.maxima(
                provider, _cublaslt_library(), dtype, device.put(self.weight), device.put(self.bias), out, width
            )
        except RuntimeError as error:
            pytest.skip(str(error))

    def run(self, x: npt.NDArray[Any], lengths: list[int]) -> Floats:
        """[texts, out]"""
        maxima = self.device.put(np.zeros((len(lengths), self.pitch), np.float32))
        text_of = self.device.put(texts_of(lengths))
        self.product.run(self.device.launch, self.device.put(x), text_of, len(x), 0, len(x), 0, maxima)
        return self.device.get(maxima, (len(lengths), self.pitch), np.float32)[:, : self.out]

    def exact(self, x: npt.NDArray[Any], lengths: list[int]) -> ref.Doubles:
        return largest(ref.exact(x), ref.exact(self.weight), ref.exact(self.bias), lengths)


@pytest.mark.parametrize(("provider", "dtype"), CASES)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_maxima_against_float64(
    device: Device, random: np.random.Generator, provider: str, dtype: int, out: int, width: int
) -> None:
    product = Product(device, random, provider, dtype, out, width)
    batches = [LENGTHS, [1], [512], [1] * 70, [8, 3, 300, 16] * 5]
    for lengths in batches if out < 30000 else batches[:2]:
        x = ref.drawn(random, (sum(lengths), width), dtype)
        wanted = product.exact(x, lengths)
        # Our own kernel rounds nothing to 16 bits; cuBLASLt's products are.
        limit = 2e-5 if provider == "hopper" else ref.allowed(wanted, dtype)
        assert ref.error(product.run(x, lengths), wanted) <= limit, lengths


@pytest.mark.parametrize(("provider", "dtype"), CASES)
def test_rows_of_other_texts_count_for_nothing(
    device: Device, random: np.random.Generator, provider: str, dtype: int
) -> None:
    """A range of rows, in which some are of no text; what lies around it is NaN."""
    out, width, lengths = 1000, 128, [40, 90, 7, 200, 33]
    product = Product(device, random, provider, dtype, out, width)
    x = ref.drawn(random, (sum(lengths), width), dtype)
    starts, nan = starts_of(lengths), ref.stored(np.array([np.nan]), dtype)
    x[: starts[1]] = x[starts[4] :] = nan
    text_of = np.full(len(x), NO_TEXT, np.int32)
    text_of[starts[1] : starts[2]], text_of[starts[3] : starts[4]] = 7, 8
    maxima = device.put(np.zeros((2, product.pitch), np.float32))
    first, end = int(starts[1]), int(starts[4])
    at = device.put(x), device.put(text_of)
    product.product.run(device.launch, *at, len(x), first, end - first, 7, maxima)
    found = device.get(maxima, (2, product.pitch), np.float32)[:, :out]
    wanted = np.concatenate([product.exact(x[starts[i] : starts[i + 1]], [lengths[i]]) for i in (1, 3)])
    assert ref.error(found, wanted) <= (2e-5 if provider == "hopper" else ref.allowed(wanted, dtype))


@pytest.mark.parametrize("provider", ["hopper", "cublaslt"])
def test_nan_is_the_largest_number(device: Device, random: np.random.Generator, provider: str) -> None:
    product = Product(device, random, provider, ref.FLOAT16, 1000, 64)
    x = ref.drawn(random, (300, 64), ref.FLOAT16)
    x[150, 3] = np.nan
    found = product.run(x, [100, 100, 100])
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2]]).all()


@pytest.mark.parametrize("chosen", [None, [0, 2, 3, 6], [5]])
@pytest.mark.parametrize("first", [0, 1])
def test_begin(device: Device, random: np.random.Generator, chosen: list[int] | None, first: int) -> None:
    lengths, columns = [5, 300, 1, 16, 17, 2, 90], 30522
    starts, pitch = starts_of(lengths), pitch_of(columns)
    sequences = chosen or list(range(len(lengths)))
    first = min(first, len(sequences) - 1)
    count, end = len(sequences) - first, int(starts[sequences[-1] + 1]) + 3  # rows up to a bucket's end
    text_of, maxima, totals = device.new((end + 1) * 4), device.new(count * pitch * 4), device.new(count * 4)
    at = 0 if chosen is None else device.put(np.array(chosen, np.int32))
    device.launch.begin_maxima(device.put(starts), at, first, count, end, pitch, text_of, maxima, totals)
    wanted = np.full(end + 1, NO_TEXT, np.int32)
    for text in range(first, len(sequences)):
        wanted[starts[sequences[text]] : starts[sequences[text] + 1]] = text
    begin = starts[sequences[first]]
    found = device.get(text_of, (end + 1,), np.int32)
    assert (found[begin:end] == wanted[begin:end]).all()
    assert (np.concatenate([found[:begin], found[end:]]) == -1).all()  # as it was: all bits set
    assert not device.get(maxima, (count, pitch), np.float32).any()
    assert not device.get(totals, (count,), np.int32).any()


def sparse(random: np.random.Generator, texts: int, columns: int, density: float) -> Floats:
    """Maxima as products leave them, with NaN where a row ends."""
    drawn = np.where(random.random((texts, columns)) < density, random.gamma(1.0, 1.0, (texts, columns)), 0)
    return np.pad(drawn, ((0, 0), (0, pitch_of(columns) - columns)), constant_values=np.nan).astype(np.float32)


def pairs_of(maxima: Floats, columns: int, logs: int = 1) -> tuple[Integers, Integers, ref.Doubles]:
    """Pairs of each text, indices end to end, values."""
    texts, indices = np.nonzero(maxima[:, :columns])
    values = maxima[texts, indices].astype(np.float64)
    for _ in range(logs):
        values = np.log1p(values)
    return np.bincount(texts, minlength=len(maxima)).astype(np.int32), indices.astype(np.int32), values


def check_values(found: Floats, wanted: ref.Doubles) -> None:
    """Some units of FP32's last place, for logarithms of logarithms."""
    assert np.allclose(found, wanted, rtol=4e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("columns", [1, 128, 1000, 1024, 1025, 30522])
@pytest.mark.parametrize("density", [0, 0.007, 0.5, 1])
@pytest.mark.parametrize("logs", [1, 2])
def test_pairs(device: Device, random: np.random.Generator, columns: int, density: float, logs: int) -> None:
    texts = 37
    maxima = sparse(random, texts, columns, density)
    if density == 1:
        maxima[3, columns // 2], maxima[4, 0], maxima[5, columns - 1] = np.inf, np.nan, 1e-40
    counts, indices, values = pairs_of(maxima, columns, logs)
    places, spans = Places(device, len(indices), texts), [(0, 10), (10, 1), (11, 26)]
    for group, (first, count) in enumerate(spans):
        places.write(maxima, columns, first, count, group, logs)
    found = places.get()
    assert (found[0] == counts).all()
    assert (found[1] == indices).all()
    check_values(found[2], values)


class Places:
    """Memory for pairs: all of it is NaN before."""

    def __init__(self, device: Device, capacity: int, texts: int):
        self.device, self.capacity, self.texts = device, capacity, texts
        self.counts, self.indices, self.values = (device.new(4 * n) for n in (texts, capacity, capacity))
        self.ends = device.new(16)

    def write(self, maxima: Floats, columns: int, first: int, count: int, group: int, logs: int = 1) -> None:
        launch, pitch = self.device.launch, maxima.shape[1]
        at = self.device.put(maxima[first : first + count])
        totals = self.device.put(np.zeros(count, np.int32))
        pieces = self.device.new(4 * count * -(-columns // PIECE))
        launch.count_pairs(at, columns, pitch, count, totals, pieces)
        before, after = self.ends + group % 2 * 8 if group > 0 else 0, self.ends + (group + 1) % 2 * 8
        launch.write_pairs(
            at, columns, pitch, first, count, totals, pieces, before, after,
            self.counts, self.indices, self.values, self.capacity, logs,
        )  # fmt: skip

    def get(self) -> tuple[Integers, Integers, Floats]:
        sizes = (self.counts, self.texts, np.int32), (self.indices, self.capacity, np.int32)
        counts, indices = (self.device.get(at, (n,), kind) for at, n, kind in sizes)
        return counts, indices, self.device.get(self.values, (self.capacity,), np.float32)


@pytest.mark.parametrize("missing", [1, 5000])
def test_a_text_whose_pairs_do_not_fit_is_skipped_as_a_whole(
    device: Device, random: np.random.Generator, missing: int
) -> None:
    texts, columns = 12, 5000
    maxima = sparse(random, texts, columns, 0.4)
    counts, indices, values = pairs_of(maxima, columns)
    capacity = int(counts.sum()) - missing
    complete = int(np.searchsorted(np.cumsum(counts), capacity, side="right"))
    kept = int(counts[:complete].sum())
    places = Places(device, capacity, texts)
    for group, first in enumerate(range(0, texts, 5)):
        places.write(maxima, columns, first, min(5, texts - first), group)
    found = places.get()
    assert (found[0] == counts).all()  # which tell the host what fits
    assert (found[1][:kept] == indices[:kept]).all()
    check_values(found[2][:kept], values[:kept])
    assert (found[1][kept:] == -1).all()
    assert np.isnan(found[2][kept:]).all()


class Head:
    """The whole head with random weights, and the same in float64."""

    def __init__(
        self,
        device: Device,
        random: np.random.Generator,
        provider: str,
        dtype: int,
        *,
        vocabulary: int,
        hidden: int,
        kind: int = ref.GELU,
        logs: int = 1,
        shift: float = 0.0,
        rows: int = 4096,
        texts: int = 1024,
        pairs: int = 1 << 20,
    ):
        self.device, self.dtype, self.vocabulary, self.hidden = device, dtype, vocabulary, hidden
        self.kind, self.logs = kind, logs
        shapes = {
            "transform.weight": (hidden, hidden), "transform.bias": (hidden,), "transform.gamma": (hidden,),
            "transform.beta": (hidden,), "decoder.bias": (vocabulary,), "decoder.weight": (vocabulary, hidden),
        }  # fmt: skip
        self.weights = {
            name: ref.stored(
                random.standard_normal(shape) * (hidden**-0.5 if len(shape) == 2 else 0.5)
                + {"transform.gamma": 1.0, "decoder.bias": shift}.get(name, 0.0),
                dtype if len(shape) == 2 or provider == "cublaslt" else ref.FLOAT32,
            )
            for name, shape in shapes.items()
        }
        addresses = [
            device.put(weight if weight.ndim == 2 else ref.exact(weight).astype(np.float32))
            for weight in self.weights.values()
        ]
        try:
            self.head: Any = device.launch.splade(
                provider, _cublaslt_library(), dtype, hidden, vocabulary, kind, 1e-5, logs,
                *addresses, rows, texts, pairs,
            )  # fmt: skip
        except RuntimeError as error:
            pytest.skip(str(error))

    def run(
        self, x: npt.NDArray[Any], lengths: list[int], chosen: list[int] | None = None, *, known: bool = True
    ) -> list[tuple[Integers, Floats]]:
        """The (indices, values) of each text that wants pairs and is complete. known: the host knows the lengths."""
        device, starts = self.device, starts_of(lengths)
        of = None if chosen is None else np.array(chosen, np.int32)
        texts = len(lengths) if chosen is None else len(chosen)
        self.head.run(
            device.launch, device.put(x), device.new(x.nbytes), len(x), texts, device.put(starts),
            0 if of is None else device.put(of), starts if known else None, of if known else None,
        )  # fmt: skip
        device.launch.synchronize()
        complete, counts, indices, values = self.head.answer(texts)
        ends = np.cumsum(counts[:complete])
        return list(zip(np.split(indices, ends)[:-1], np.split(values, ends)[:-1], strict=True))

    def exact(self, x: npt.NDArray[Any], lengths: list[int]) -> ref.Doubles:
        w = {name: ref.exact(weight) for name, weight in self.weights.items()}
        rows = ref.activation(ref.exact(x) @ w["transform.weight"].T + w["transform.bias"], self.kind)
        rows = ref.layernorm(rows, w["transform.gamma"], w["transform.beta"], 1e-5)
        values = largest(rows, w["decoder.weight"], w["decoder.bias"], lengths)
        for _ in range(self.logs):
            values = np.log1p(values)
        return values


def same(a: list[tuple[Integers, Floats]], b: list[tuple[Integers, Floats]]) -> bool:
    return [(i.tobytes(), v.tobytes()) for i, v in a] == [(i.tobytes(), v.tobytes()) for i, v in b]


@pytest.mark.parametrize(("provider", "dtype"), CASES)
@pytest.mark.parametrize(("kind", "logs"), [(ref.GELU, 1), (ref.GELU_TANH, 2), (ref.RELU, 1)])
def test_the_head_against_float64(
    device: Device, random: np.random.Generator, provider: str, dtype: int, kind: int, logs: int
) -> None:
    device.launch.dependent_launch(provider == "hopper")
    head = Head(device, random, provider, dtype, vocabulary=5003, hidden=256, kind=kind, logs=logs, shift=-2.0)
    lengths = [*LENGTHS[:-1], 260]
    x = ref.drawn(random, (sum(lengths), 256), dtype)
    found, wanted = head.run(x, lengths), head.exact(x, lengths)
    assert len(found) == len(lengths)
    edge = {ref.FLOAT16: 1e-2, ref.BFLOAT16: 8e-2, ref.FLOAT32: 1e-4}[dtype]  # logits near 0 may round to either side
    for text, (indices, values) in enumerate(found):
        assert (np.diff(indices) > 0).all()
        dense = np.zeros(head.vocabulary)
        dense[indices] = values
        assert (dense[wanted[text] > edge] > 0).all(), lengths[text]
        assert (wanted[text][indices] > 0)[values > edge].all(), lengths[text]
        cosine = dense @ wanted[text] / np.linalg.norm(dense) / np.linalg.norm(wanted[text])
        assert cosine >= (0.9999 if dtype == ref.BFLOAT16 else 0.99999), lengths[text]


def test_pairs_are_batch_invariant(device: Device, random: np.random.Generator) -> None:
    """Also where texts come in groups, some want no pairs, the host knows no lengths, or room runs out."""
    device.launch.dependent_launch(True)
    head = Head(device, random, "hopper", ref.FLOAT16, vocabulary=30522, hidden=384, shift=-3.0, pairs=1 << 22)
    lengths = [int(n) for n in random.integers(1, 6, 1000)]  # more than are run at once
    assert head.head.texts_at_once < len(lengths)
    x, starts = ref.drawn(random, (sum(lengths), 384), ref.FLOAT16), starts_of(lengths)
    together = head.run(x, lengths)
    assert len(together) == len(lengths)
    assert min(len(indices) for indices, _ in together) > 0
    for text in (0, 500, 547, 548, 999):  # of either group
        single = head.run(x[starts[text] : starts[text + 1]], [lengths[text]])
        assert same(single, [together[text]]), text
    chosen = [0, 1, 17, 600, 601, 998]
    assert same(head.run(x, lengths, chosen), [together[i] for i in chosen])
    few = head.run(x[: starts[40]], lengths[:40], known=False)
    assert same(few, together[:40])


def test_lengths_that_the_host_does_not_know_fit_one_group(device: Device, random: np.random.Generator) -> None:
    head = Head(device, random, "hopper", ref.FLOAT16, vocabulary=30522, hidden=64)
    x = ref.drawn(random, (1000, 64), ref.FLOAT16)
    with pytest.raises(RuntimeError, match=r"1000.* 548"):
        head.run(x, [1] * 1000, known=False)


def test_memory(device: Device, random: np.random.Generator) -> None:
    """Beyond the encoder's, for 16 384 tokens of any texts: 200 MB."""
    for provider in ("hopper", "cublaslt"):
        head = Head(
            device, random, provider, ref.FLOAT16, vocabulary=30522, hidden=64, rows=16384, texts=16384, pairs=8 << 20
        )
        assert head.head.workspace_bytes <= 200e6, provider
