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
TILE = 128  # columns
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


def test_memory(device: Device, random: np.random.Generator) -> None:
    """Beyond the encoder's, for 16 384 tokens of any texts: 200 MB."""
    for provider in ("hopper", "cublaslt"):
        head = Head(
            device, random, provider, ref.FLOAT16, vocabulary=30522, hidden=64, rows=16384, texts=16384, pairs=8 << 20
        )
        assert head.head.workspace_bytes <= 200e6, provider
