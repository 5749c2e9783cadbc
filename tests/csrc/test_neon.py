"""The CPU kernels for NEON on an emulated CPU, compared with float64 and with the definition of int8."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert.engine.quantization.rows import product, quantize_rows, quantize_weight
from tests.csrc.host_program import CSRC

pytestmark = pytest.mark.timeout(600)  # compilers and an emulator, on cores that others may use

Floats = npt.NDArray[np.float32]

# The options of csrc/cpu/CMakeLists.txt for each instruction set.
OPTIONS = {"neon": "-march=armv8-a", "neon_dot": "-march=armv8.2-a+dotprod"}
KERNELS = ("attention", "gemm/int8_linear", "gemm/linear", "kernels", "row_ops")
ANY_CPU = ("layer", "memory", "thread_pool")
HIDDEN, INNER, HEADS, LAYERS, TABLE_ROWS = 48, 100, 3, 2, 60


class Neon:
    """The kernels of one instruction set."""

    def __init__(self, program: Path, name: str) -> None:
        self._program, self._name = program, name

    def __call__(
        self, kernel: str, numbers: Sequence[int], *arrays: npt.NDArray[np.generic], threads: int = 1
    ) -> Floats:
        command = ["qemu-aarch64", self._program, self._name, kernel, threads, *numbers]
        given = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
        done = subprocess.run([str(part) for part in command], input=given, capture_output=True, check=True)
        return np.frombuffer(bytearray(done.stdout), np.float32)  # writable, as torch wants it


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None or shutil.which("qemu-aarch64") is None:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64")
    folder = tmp_path_factory.mktemp("neon")
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    sources = [(CSRC / "cpu" / f"{name}.cpp", folder / f"{name}.o", "-march=armv8-a") for name in ANY_CPU]
    for name, option in OPTIONS.items():
        sources += [(CSRC / "cpu" / f"{k}.cpp", folder / f"{name}_{Path(k).name}.o", option) for k in KERNELS]
    sources.append((Path(__file__).with_name("neon_kernels.cpp"), folder / "main.o", "-march=armv8-a"))

    def build(source: tuple[Path, Path, str]) -> None:
        subprocess.run([compiler, *options, source[2], "-c", source[0], "-o", source[1]], check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build, sources))
    made = folder / "neon_kernels"
    subprocess.run([compiler, "-static", *(each[1] for each in sources), "-o", made, "-pthread"], check=True)
    return made


@pytest.fixture(params=OPTIONS)
def neon(request: pytest.FixtureRequest, program: Path) -> Neon:
    return Neon(program, request.param)


def drawn(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weights() -> list[list[Floats]]:
    """Weights of the embeddings and of each layer, in the order in which the program reads them."""
    tables = [drawn(1, TABLE_ROWS, HIDDEN), drawn(2, TABLE_ROWS, HIDDEN), drawn(3, HIDDEN), drawn(4, HIDDEN)]
    shapes = [(3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)]
    layers = []
    for layer in range(LAYERS):
        linears = [(0.1 * drawn(10 * layer + i, *shape), drawn(99, shape[0])) for i, shape in enumerate(shapes)]
        layers.append([*(part for linear in linears for part in linear), *(drawn(50 + i, HIDDEN) for i in range(4))])
    return [tables, *layers]


def exact(ids: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [sequences · length, HIDDEN] and means, in float64."""
    (words, places, *norm), *layers = ([torch.from_numpy(each).double() for each in part] for part in weights())
    sequences, length = ids.shape

    def normalized(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (HIDDEN,), gamma, beta, 1e-12)

    x = normalized(words[torch.from_numpy(ids)] + places[:length], *norm)
    for w1, b1, w2, b2, w3, b3, w4, b4, *norms in layers:
        q, k, v = F.linear(x, w1, b1).view(sequences, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        # Queries are scaled by the weights that the encoder gives to the kernels.
        context = F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(2)
        x = normalized(x + F.linear(context, w2, b2), *norms[:2])
        x = normalized(x + F.linear(F.gelu(F.linear(x, w3, b3)), w4, b4), *norms[2:])
    return x.flatten(0, 1), x.mean(1)


def run_model(neon: Neon, ids: npt.NDArray[np.int64], threads: int) -> tuple[Floats, Floats]:
    sequences, length = ids.shape
    numbers = [sequences, length, LAYERS, HIDDEN, INNER, HEADS, TABLE_ROWS]
    positions = np.tile(np.arange(length), sequences)
    found = neon("model", numbers, ids, positions, *(array for part in weights() for array in part), threads=threads)
    rows, means = np.split(found, [ids.size * HIDDEN])
    return rows.reshape(-1, HIDDEN), means.reshape(-1, HIDDEN)


def test_whole_model_against_float64_and_its_bits_in_any_batch(neon: Neon) -> None:
    ids = np.random.default_rng(7).integers(0, TABLE_ROWS, (3, 37))
    rows, means = run_model(neon, ids, threads=3)
    for found, wanted in zip((rows, means), exact(ids), strict=True):
        torch.testing.assert_close(torch.from_numpy(found).double(), wanted, rtol=1e-5, atol=2e-5)
    alone, _ = run_model(neon, ids[1:2], threads=1)
    assert np.array_equal(alone, rows[37:74])


@pytest.mark.parametrize("window", [-1, 9])
def test_attention_with_rope_and_a_window(neon: Neon, window: int) -> None:
    length, heads, size = 70, 2, 24
    qkv = 0.5 * drawn(1, length, 3, heads, size)
    angles = np.arange(length)[:, None] / 100.0 ** (np.arange(size // 2) * 2 / size)
    gamma = drawn(2, heads * size)
    found = neon(
        "attend", [length, heads, size, window], qkv, *(f(angles).astype(np.float32) for f in (np.cos, np.sin)), gamma
    )
    q, k, v = torch.from_numpy(qkv).double().permute(1, 2, 0, 3)
    low, high = (torch.from_numpy(f(angles)).repeat(1, 2) for f in (np.cos, np.sin))

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * low + torch.cat([-second, first], -1) * high

    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    mask = distance <= window if window >= 0 else distance >= 0
    context = F.scaled_dot_product_attention(rotated(q), rotated(k), v, attn_mask=mask, scale=1.0)
    wanted = context.transpose(0, 1).flatten(1)
    normalized = F.rms_norm(wanted, (heads * size,), torch.from_numpy(gamma).double(), 1e-6)
    for part, expected in zip(np.split(found, 2), (wanted, normalized), strict=True):
        torch.testing.assert_close(torch.from_numpy(part).view_as(expected).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 7])
def test_int8_is_the_definition(neon: Neon, rows: int) -> None:
    x, weight, bias = drawn(1, rows, 256), quantize_weight(drawn(2, 70, 256), "w"), drawn(3, 70)
    found = neon("int8", [rows, 70, 256], x, weight.integers, weight.scales, bias)
    assert np.array_equal(found.reshape(rows, 70), product(quantize_rows(x), weight, bias))
