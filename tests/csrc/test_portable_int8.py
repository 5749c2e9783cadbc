"""Products of 8 bits as GPUs other than Hopper run them, on the host: the kernel's own source, lane by lane.

A stand-in for cuBLASLt multiplies the integers. What follows is held to the arithmetic of csrc/gemm/epilogue/finish.cuh
in numpy, each operation rounded to float32 as it is there, bit for bit; and to the definition in float64.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.csrc import reference as ref
from tests.csrc.host_program import CSRC, build

HERE = Path(__file__).parent
STAND_IN = HERE / "stand_in_cublaslt"
EPSILON = np.float32(1e-5)
FLOAT32, FLOAT16 = 0, 1  # the extension's numbers of types
SILU = 4
ADDED = ("norm", "rows", "sums", "sums of y")  # what belongs to a residual
ALL_ADDED = (1 << len(ADDED)) - 1
SUM_BYTES = 32 << 20  # csrc/gemm/int8/portable.h
WORKSPACE = 32 << 20

Floats = npt.NDArray[np.float32]

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("portable-int8")
    flags = ["-I", str(STAND_IN), "-DEMBERT_HAS_CUBLASLT"]
    library = build(folder, STAND_IN / "cublaslt.cpp", name="stand_in.so", flags=[*flags, "-shared", "-fPIC"])
    sources = [HERE / "portable_int8.cpp", CSRC / "gemm" / "cublaslt.cpp", CSRC / "gemm" / "int8" / "portable.cpp"]
    ours = ["-iquote", str(HERE / "kernels_on_host"), "-Wno-unknown-pragmas"]  # as one that nvcc alone knows
    return build(folder, *sources, flags=[*ours, *flags, "-ldl"]), library


@dataclass
class Product:
    """What a product is made of and given. `x`, `weight` and `residual` are in the types that the device has."""

    x: npt.NDArray[np.int8]
    row_scales: Floats
    weight: npt.NDArray[np.int8]
    scales: Floats
    bias: Floats
    gamma: Floats
    beta: Floats
    residual: npt.NDArray[np.float16]
    sums: Floats  # of the residual: [rows, groups, parts, 2]
    kind: int
    adds: int  # a bit for each of ADDED

    @classmethod
    def of(cls, rows: int, out: int, width: int, kind: int = ref.NONE, parts: int = 0, seed: int = 0) -> Product:
        """`parts`: of a group of the residual's sums; 0: there is no residual."""
        random = np.random.default_rng(seed)
        residual = (random.standard_normal((rows, out)) * 3 + 0.5).astype(np.float16)
        return cls(
            random.integers(-127, 128, (rows, width), dtype=np.int8),
            random.uniform(1e-3, 2e-3, rows).astype(np.float32),
            random.integers(-127, 128, (out, width), dtype=np.int8),
            random.uniform(1e-3, 2e-3, out).astype(np.float32),
            random.standard_normal(out).astype(np.float32),
            random.uniform(0.5, 1.5, out).astype(np.float32),
            random.standard_normal(out).astype(np.float32),
            residual,
            sums_in_parts(residual, max(parts, 1)),
            kind,
            ALL_ADDED if parts > 0 else 0,
        )

    def rows(self, which: slice) -> Product:
        """The same of some rows."""
        return Product(
            self.x[which], self.row_scales[which], self.weight, self.scales, self.bias, self.gamma, self.beta,
            self.residual[which], self.sums[which], self.kind, self.adds,
        )  # fmt: skip

    def integer_sums(self) -> npt.NDArray[np.int64]:
        return (self.x.astype(np.float64) @ self.weight.astype(np.float64).T).astype(np.int64)


@dataclass
class Answer:
    y: npt.NDArray[np.float16]
    y_stats: Floats
    said: list[str]
    stays: bool  # what lies behind the last row


def sums_in_parts(rows: npt.NDArray[np.float16], parts: int) -> Floats:
    """Sums and sums of squares of each part of 128 columns. What a narrow last group does not have is not a number."""
    width = 128 // parts
    wide = np.zeros((len(rows), -(-rows.shape[1] // 128) * 128))
    wide[:, : rows.shape[1]] = rows
    pieces = wide.reshape(len(rows), -1, parts, width)
    found = np.stack([pieces.sum(axis=3), np.square(pieces).sum(axis=3)], axis=3).astype(np.float32)
    first = np.arange(pieces.shape[1])[:, None] * 128 + np.arange(parts) * width
    found[:, first >= rows.shape[1]] = np.nan
    return found


def run(program: tuple[Path, Path], of: Product, normed: bool = False, dtype: int = FLOAT16) -> Answer:
    rows, out = len(of.x), len(of.bias)
    header = np.array(
        [rows, out, of.x.shape[1], of.kind, of.sums.shape[2], of.adds, normed, dtype], np.int32
    ).tobytes()  # fmt: skip
    arrays: list[npt.NDArray[Any]] = [of.x, of.row_scales, of.weight, of.scales, of.bias, of.gamma, of.beta]
    arrays += [of.residual, of.sums] if of.adds else []
    given = header + b"".join(each.tobytes() for each in arrays)
    done = subprocess.run([*map(str, program)], input=given, capture_output=True, check=True)
    said = done.stderr.decode().splitlines()
    if said[-1].startswith("refused"):
        return Answer(np.empty(0, np.float16), np.empty(0, np.float32), said, stays=True)
    y = np.frombuffer(done.stdout, np.float16, (rows + 1) * out).reshape(rows + 1, out)
    y_stats = np.frombuffer(done.stdout, np.float32, offset=y.nbytes).reshape(rows + 1, -1, 2)
    stays = bool((y[-1:].view(np.uint16) == 0xFFFF).all() and (y_stats[-1] == -1).all())
    return Answer(y[:-1], y_stats[:-1], said, stays)


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a·b + c with one rounding. A product of float32 is exact in float64; their sum is rounded to odd there first."""
    product, addend = a.astype(np.float64) * b, np.asarray(c, np.float64)
    total = product + addend
    part = total - product
    missed = (product - (total - part)) + (addend - part)  # exact: Knuth's two sums
    even = (total.view(np.int64) & 1) == 0
    towards = np.where((missed > 0) == (total > 0), 1, -1)  # away from 0, or to it
    odd = (total.view(np.int64) + np.where((missed != 0) & even, towards, 0)).view(np.float64)
    rounded: Floats = np.asarray(odd, np.float64).astype(np.float32)
    return rounded


def finished(of: Product) -> Floats:
    """Before the activation, without a residual: csrc/gemm/epilogue/finish.cuh's finish_sums."""
    factor = np.float32({ref.NONE: 1, ref.RELU: 0.25}.get(of.kind, 0.125))  # ops/activation_pair.cuh
    by_row = of.integer_sums().astype(np.float32) * (factor * of.row_scales)[:, None]
    return fused(by_row, np.broadcast_to(of.scales, by_row.shape), np.broadcast_to(factor * of.bias, by_row.shape))


def added(of: Product) -> tuple[Floats, Floats]:
    """With a residual, in float32, and the sums of rows: scaled_sum, finish and row_stats.cuh."""
    out = len(of.bias)
    low = (of.integer_sums().astype(np.float32) * of.row_scales[:, None]) * of.scales
    parts = np.nan_to_num(of.sums)  # parts past a row's end are not read
    while parts.shape[2] > 1:
        parts = parts[:, :, ::2] + parts[:, :, 1::2]
    groups = np.zeros((len(low), 8, 2), np.float32)
    groups[:, : parts.shape[1]] = parts[:, :, 0]
    four = groups[:, :4] + groups[:, 4:]
    sums = (four[:, 0] + four[:, 1]) + (four[:, 2] + four[:, 3])
    inverse = np.float32(1) / np.float32(out)
    mean = sums[:, 0] * inverse
    variance = np.maximum(fused(-mean, mean, sums[:, 1] * inverse), np.float32(0))
    scale = np.float32(1) / np.sqrt(variance + EPSILON)
    shift = -mean * scale
    normal = fused(of.residual.astype(np.float32), *np.broadcast_arrays(scale[:, None], shift[:, None]))
    y = fused(normal, np.broadcast_to(of.gamma, low.shape), low + (of.bias + of.beta))
    wide = np.zeros((len(y), -(-out // 128) * 128), np.float32)
    wide[:, :out] = y
    places = wide.reshape(len(y), -1, 8, 2, 4, 2)  # group, piece, half of it, lane of an m16n8 tile, column
    a, b = places[..., 0], places[..., 1]
    pairs = np.stack([a + b, fused(a, a, b * b)], axis=-1)
    lanes = pairs[..., 0, :, :] + pairs[..., 1, :, :]
    pieces = (lanes[..., 0, :] + lanes[..., 2, :]) + (lanes[..., 1, :] + lanes[..., 3, :])
    two = pieces[..., ::2, :] + pieces[..., 1::2, :]
    four_pieces = two[..., ::2, :] + two[..., 1::2, :]
    return y, four_pieces[..., 0, :] + four_pieces[..., 1, :]


SIZES = [(1, 8, 128), (3, 256, 128), (33, 1152, 384), (65, 520, 256), (130, 3072, 128)]


@pytest.mark.parametrize(("rows", "out", "width"), SIZES)
@pytest.mark.parametrize("kind", [ref.NONE, ref.RELU])
def test_rows_are_numpys_to_the_bit(program: tuple[Path, Path], rows: int, out: int, width: int, kind: int) -> None:
    product = Product.of(rows, out, width, kind)
    answer = run(program, product)
    wanted = finished(product)
    wanted = np.maximum(wanted, 0) if kind == ref.RELU else wanted
    assert answer.y.tobytes() == wanted.astype(np.float16).tobytes()
    assert answer.stays


@pytest.mark.parametrize("kind", [ref.GELU, ref.GELU_TANH])
def test_activations(program: tuple[Path, Path], kind: int) -> None:
    product = Product.of(40, 768, 128, kind)
    answer = run(program, product)
    exact = product.integer_sums() * product.row_scales.astype(np.float64)[:, None] * product.scales + product.bias
    wanted = ref.activation(exact, kind) / 4
    assert ref.error(answer.y, wanted) <= 2 * ref.rounding(wanted, ref.FLOAT16)  # x is rounded, too


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize(("rows", "out"), [(1, 1024), (5, 768), (37, 384), (6, 128), (9, 200), (4, 8)])
def test_a_residual_its_layernorm_and_sums_are_numpys_to_the_bit(
    program: tuple[Path, Path], rows: int, out: int, parts: int
) -> None:
    product = Product.of(rows, out, 128, parts=parts)
    answer = run(program, product)
    y, sums = added(product)
    assert answer.y.tobytes() == y.astype(np.float16).tobytes()
    assert answer.y_stats.tobytes() == sums.tobytes()
    assert answer.stays
    assert answer.said[-1] == f"parts=1 workspace={WORKSPACE + SUM_BYTES}"
    # What numpy repeats is what the definition says.
    exact = product.integer_sums() * product.row_scales.astype(np.float64)[:, None] * product.scales + product.bias
    norm = product.gamma.astype(np.float64), product.beta.astype(np.float64)
    exact += ref.layernorm(product.residual.astype(np.float64), *norm, float(EPSILON))
    assert ref.error(y, exact) <= 1e-6
    assert np.allclose(sums.sum(axis=1), np.stack([exact.sum(axis=1), (exact**2).sum(axis=1)], axis=1), rtol=1e-4)


@pytest.mark.parametrize("parts", [0, 1])
def test_a_row_has_the_same_bits_in_any_company(program: tuple[Path, Path], parts: int) -> None:
    product = Product.of(150, 384, 128, parts=parts)
    together = run(program, product)
    for some in (slice(0, 1), slice(149, 150), slice(7, 40), slice(31, 97)):
        alone = run(program, product.rows(some))
        assert alone.y.tobytes() == together.y[some].tobytes()
        assert not parts or alone.y_stats.tobytes() == together.y_stats[some].tobytes()


def test_many_rows_go_in_pieces_that_fit_memory(program: tuple[Path, Path]) -> None:
    """Of equal size, as few as fit: 256 rows of 32 768 columns are 32 MB."""
    product = Product.of(300, 32768, 128)
    answer = run(program, product, normed=True)
    assert answer.said[:-1] == [
        "quantise rows=300 columns=128 sums=1 normed=1 epsilon=1e-05", "integers rows=160", "integers rows=160",
    ]  # fmt: skip
    assert answer.y.tobytes() == finished(product).astype(np.float16).tobytes()
    assert answer.stays


def test_pieces_with_a_residual(program: tuple[Path, Path]) -> None:
    product = Product.of(8200, 1024, 128, parts=2)
    answer = run(program, product)
    assert [line for line in answer.said if "integers" in line] == ["integers rows=4128", "integers rows=4096"]
    y, sums = added(product)
    assert answer.y.tobytes() == y.astype(np.float16).tobytes()
    assert answer.y_stats.tobytes() == sums.tobytes()


def test_rows_without_a_layernorm_are_quantized_as_they_are(program: tuple[Path, Path]) -> None:
    answer = run(program, Product.of(17, 128, 256))
    assert answer.said[:2] == ["quantise rows=17 columns=256 sums=0 normed=0 epsilon=1e-05", "integers rows=32"]


@pytest.mark.parametrize(
    ("sizes", "options", "said"),
    [
        ((2, 128, 192), {}, "portable int8: 192 to 128 columns"),
        ((2, 12, 128), {}, "portable int8: 128 to 12 columns"),
        ((2, 128, 1280), {"normed": True}, "portable int8: 1280 to 128 columns"),
        ((2, 128, 128, SILU), {}, "portable int8: gates, SiLU"),
        ((2, 128, 128, ref.RELU, 1), {}, "portable int8: a residual and an activation, or over 1024 columns"),
        ((2, 1152, 128, ref.NONE, 1), {}, "portable int8: a residual and an activation, or over 1024 columns"),
        ((2, 128, 128), {"dtype": FLOAT32}, "portable int8: rows must be in float16"),
    ],
)
def test_what_is_refused(
    program: tuple[Path, Path], sizes: tuple[int, ...], options: dict[str, bool], said: str
) -> None:
    assert run(program, Product.of(*sizes), **options).said[-1].startswith(f"refused {said}")


@pytest.mark.parametrize("bit", range(len(ADDED)), ids=ADDED)
@pytest.mark.parametrize("is_there", [True, False], ids=["alone", "missing"])
def test_a_residual_is_refused_in_part(program: tuple[Path, Path], bit: int, is_there: bool) -> None:
    product = Product.of(2, 128, 128, parts=1)
    product.adds = 1 << bit if is_there else ALL_ADDED - (1 << bit)
    said = run(program, product).said
    assert said == ["refused int8: a residual comes with its LayerNorm and leaves sums, or there is none"]
