"""Our own kernels for CPUs compared with float64, and with the definition of int8."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everywhere in torch

from embert import engine
from embert.engine.encoders.cpu import kernels, runs
from embert.engine.encoders.cpu.kernels import Activation
from embert.engine.encoders.cpu.operators import Attention, HeadParts, KernelOperators
from embert.engine.encoders.cpu.positions import Positions, Rotation
from embert.engine.encoders.cpu.runs import Group
from embert.engine.encoders.cpu.transformer import Layer
from embert.engine.encoders.loader import create_encoder
from embert.engine.encoders.positions import relative_rows
from embert.engine.encoders.torch import attention as torch_attention
from embert.engine.models.encoder_config import Disentangled, EncoderConfig, Rotary
from embert.engine.models.tensor_names import TensorNames
from embert.engine.quantization.rows import product, quantize_rows, quantize_weight
from embert.engine.tasks import Task
from embert.engine.weights.checkpoint import Checkpoint
from tests.engine.conftest import Floats, random_sequences, small_tokenizer
from tests.oracles.model_cases import build

pytestmark = [pytest.mark.cpu("kernels"), pytest.mark.instructions]

EXACT: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "silu": F.silu,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    yield
    runs.allow_threads(1)


@pytest.fixture(params=[1, 3], ids=["one thread", "three"])
def _threads(request: pytest.FixtureRequest) -> None:
    runs.allow_threads(request.param)


def drawn(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def double(array: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).double()


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("activation", EXACT)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 1, 1), (5, 60, 70), (7, 384, 40), (7, 384, 64), (97, 65, 129), (200, 384, 1152)]
)
def test_linear_layer(rows: int, inputs: int, outputs: int, activation: Activation) -> None:
    x, weight, bias = drawn(1, rows, inputs), drawn(2, outputs, inputs), drawn(3, outputs)
    residual, gate = drawn(4, rows, outputs), drawn(5, rows, outputs)
    exact = F.linear(double(x), double(weight), double(bias))
    allowed: dict[str, Any] = {"rtol": 1e-6, "atol": 2e-6 * math.sqrt(inputs)}  # sums of `inputs` numbers around 1
    layer = kernels.linear(weight, bias, activation)
    torch.testing.assert_close(double(layer(x)), EXACT[activation](exact), **allowed)
    wanted = EXACT[activation](exact + double(residual)) * double(gate)
    torch.testing.assert_close(double(layer(x, residual, gate)), wanted, rtol=1e-6, atol=4 * allowed["atol"])
    transposed = np.ascontiguousarray(x.T).T  # rows that do not lie end to end
    assert np.array_equal(layer(transposed), layer(x))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "relu"])
def test_activations_of_every_size(activation: Activation) -> None:
    parts: list[npt.NDArray[Any]] = [
        np.linspace(-15, 15, 60_001),
        drawn(1, 5000),
        np.array([0.0, -0.0, 3e38, -1e30, 1e-40]),
    ]
    x: Floats = np.concatenate(parts).astype(np.float32)
    layer = kernels.linear(np.ones((1, 1), np.float32), None, activation)
    found, exact = double(layer(x[:, None])[:, 0]), EXACT[activation](double(x))
    assert ((found - exact).abs() <= 2.5e-7 * exact.abs() + 2.5e-8).all()
    for wrong in (math.nan, math.inf):
        assert not np.isfinite(layer(np.full((1, 1), wrong, np.float32))).any(), "what is wrong must be seen"


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("columns", [1, 15, 60, 384])
@pytest.mark.parametrize("with_beta", [True, False])
def test_norms(columns: int, with_beta: bool) -> None:
    x, gamma, beta = 3 + 5 * drawn(1, 200, columns), drawn(2, columns), drawn(3, columns) if with_beta else None
    if beta is None:
        exact = F.rms_norm(double(x), (columns,), double(gamma), 1e-6)
    else:
        exact = F.layer_norm(double(x), (columns,), double(gamma), double(beta), 1e-6)
    torch.testing.assert_close(double(kernels.apply_norm(x, (gamma, beta, 1e-6))), exact, rtol=1e-5, atol=2e-6)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("columns", [20, 384])
@pytest.mark.parametrize("tokens", [0, 1, 300])
def test_embeddings(tokens: int, columns: int) -> None:
    words, positions, gamma, beta = drawn(1, 50, columns), drawn(2, 9, columns), drawn(3, columns), drawn(4, columns)
    random = np.random.default_rng(tokens)
    ids, places = (random.integers(0, most, tokens) for most in (50, 9))
    exact = F.layer_norm(double(words[ids] + positions[places]), (columns,), double(gamma), double(beta), 1e-6)
    embeddings = kernels.KernelEmbeddings(words, positions, (gamma, beta, 1e-6))
    torch.testing.assert_close(double(embeddings(ids, places)), exact, rtol=1e-5, atol=2e-6)
    for wrong in (-1, 50):
        with pytest.raises(IndexError, match="outside of its table"):
            embeddings(np.array([0, wrong]), np.array([0, 0]))
    with pytest.raises(IndexError, match="outside of its table"):
        embeddings(np.array([0]), np.array([9]))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("columns", [20, 384])
def test_means(columns: int) -> None:
    groups = [Group(0, 3, 1), Group(3, 2, 7), Group(17, 1, 129), Group(146, 4, 300)]
    hidden = 3 + drawn(1, 1346, columns)
    exact = [double(hidden[start : start + n * length]).view(n, length, -1).mean(1) for start, n, length, *_ in groups]
    torch.testing.assert_close(double(kernels.means(hidden, groups)), torch.cat(exact), rtol=1e-6, atol=1e-6)


def exact_attention(
    qkv: Floats, group: Group, heads: int, positions: Positions, *, kv_heads: int = 0, causal: bool = False
) -> torch.Tensor:
    start, n, length, keys, *_ = group
    kv_heads = kv_heads or heads
    parts = double(qkv[start : start + n * length]).view(n, length, heads + 2 * kv_heads, -1).transpose(1, 2)
    q, k, v = parts.tensor_split((heads, heads + kv_heads), 1)
    if positions.rotation is not None:
        q, k = (torch_attention.rotate(each.float(), positions.rotation).double() for each in (q, k))
    k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
    scores = q @ k.mT
    distances = torch.arange(length) - torch.arange(length)[:, None]
    if positions.bias is not None:
        scores += double(positions.bias)[:, distances + (positions.bias.shape[1] - 1) // 2]
    unseen = (distances > 0) if causal else torch.zeros(length, length, dtype=torch.bool)
    unseen[:, keys or length :] = True
    if positions.window is not None:
        unseen |= distances.abs() > positions.window
    mixed: torch.Tensor = scores.masked_fill(unseen, -math.inf).softmax(-1).nan_to_num(0.0) @ v
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


LONGEST = 1500  # tokens
POSITIONS = {
    "plain": lambda heads, size: Positions(),
    "rotated": lambda heads, size: Positions(Rotation(Rotary(10_000.0, size), LONGEST)),
    "half rotated": lambda heads, size: Positions(Rotation(Rotary(10_000.0, size // 2), LONGEST)),
    "biased": lambda heads, size: Positions(bias=drawn(9, heads, 2 * LONGEST - 1)),
    "window": lambda heads, size: Positions(window=20),
    "narrow window": lambda heads, size: Positions(window=1),
    "all": lambda heads, size: Positions(Rotation(Rotary(1e4, size), LONGEST), drawn(9, heads, 2 * LONGEST - 1), 64),
}


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("kind", POSITIONS)
@pytest.mark.parametrize(("heads", "size"), [(12, 32), (3, 64), (2, 80)])
def test_attention(heads: int, size: int, kind: str) -> None:
    positions = POSITIONS[kind](heads, size)
    lengths = [1, 2, 15, 16, 17, 64, 65, 100, 191, 300, *([1300] if heads == 2 else [])]
    groups, start = [], 3
    for number, length in enumerate(lengths):
        groups.append(Group(start, 1 + number % 3, length, (length + 1) // 2 if number % 4 == 3 else 0))
        start += groups[-1].sequences * length
    qkv = 0.4 * drawn(5, start + 2, 3 * heads * size)
    context = np.full((start + 2, heads * size), 7.0, np.float32)
    for group in groups:
        kernels.attend(qkv, group, heads, positions, context)
        rows = slice(group.start, group.start + group.sequences * group.length)
        wanted = exact_attention(qkv, group, heads, positions)
        torch.testing.assert_close(double(context[rows]), wanted, rtol=1e-5, atol=3e-6)
    assert (context[:3] == 7).all(), "what comes before and after is left alone"
    assert (context[start:] == 7).all()


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 32), (3, 1, 20), (2, 2, 64)])
def test_attention_of_decoders(heads: int, kv_heads: int, size: int, causal: bool, window: int | None) -> None:
    """Heads of 20 columns are padded."""
    config = EncoderConfig(
        "", 9, heads * size, 1, heads, 9, "gelu", 700, 1, 1e-5, TensorNames(()), causal=causal, key_value_heads=kv_heads
    )
    positions = Positions(Rotation(Rotary(10_000.0, size), 700), window=window)
    groups = [Group(0, 3, 1), Group(3, 2, 17), Group(37, 1, 97, 50), Group(134, 1, 691)]
    qkv = 0.4 * drawn(5, 825, (heads + 2 * kv_heads) * size)
    found = Attention(config, HeadParts())(qkv, groups, positions)
    reference = torch_attention.Attention(config, HeadParts())(torch.from_numpy(qkv), groups, positions)
    wanted = torch.cat([exact_attention(qkv, g, heads, positions, kv_heads=kv_heads, causal=causal) for g in groups])
    torch.testing.assert_close(double(found), wanted, rtol=1e-5, atol=3e-6)
    torch.testing.assert_close(reference.double(), wanted, rtol=1e-5, atol=3e-6)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("kind", ["rotary", "window", "bias"])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 32), (3, 1, 20)])
def test_attention_of_a_shared_prefix(heads: int, kv_heads: int, size: int, kind: str) -> None:
    """Rows have the bits that they have in a text which has the prefix's rows itself."""
    config = EncoderConfig(
        "", 9, heads * size, 1, heads, 9, "gelu", 900, 1, 1e-5, TensorNames(()), causal=True, key_value_heads=kv_heads
    )
    rotation = None if kind == "bias" else Rotation(Rotary(10_000.0, size), 900)
    bias = drawn(3, heads, 2 * 900 - 1) if kind == "bias" else None
    positions, attention = Positions(rotation, bias, 100 if kind == "window" else None), Attention(config, HeadParts())
    shared = 331
    qkv = 0.4 * drawn(5, 5 + shared + 3 * 170 + 2 * 9, (heads + 2 * kv_heads) * size)
    groups = [Group(0, 1, 5), Group(5, 1, shared), Group(5 + shared, 3, 170, 0, 300, 5), Group(846, 2, 9, 0, 331, 5)]
    found = attention(qkv.copy(), groups, positions)
    for start, sequences, length, _, prefix, prefix_start in groups:
        for own in range(start, start + sequences * length, length):
            rows = np.concatenate([qkv[prefix_start : prefix_start + prefix], qkv[own : own + length]])
            alone = attention(rows, [Group(0, 1, prefix + length)], positions)
            np.testing.assert_array_equal(found[own : own + length], alone[prefix:])


def test_nan_in_attention_stays_nan() -> None:
    for positions in (Positions(), Positions(window=2)):
        qkv = drawn(1, 40, 3 * 64)
        qkv[20, 64] = math.nan  # a key
        context = np.zeros((40, 64), np.float32)
        kernels.attend(qkv, Group(0, 1, 40), 1, positions, context)
        assert np.isnan(context[20]).all()


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 384, 1536), (5, 128, 30), (6, 1536, 384), (7, 128, 30), (97, 384, 1536)]
)
def test_linear_layer_in_eight_bits_is_the_definitions(rows: int, inputs: int, outputs: int) -> None:
    """To the bit: integers, sums and what scales them."""
    weight, bias = drawn(2, outputs, inputs), drawn(3, outputs)
    x = drawn(1, rows, inputs) * np.logspace(-20, 5, rows, dtype=np.float32)[:, None]
    x[rows // 2] = 0
    wanted = product(quantize_rows(x), quantize_weight(weight, "w"), bias)
    parts = [quantize_weight(weight[: outputs // 3], "w"), quantize_weight(weight[outputs // 3 :], "w")]
    np.testing.assert_array_equal(kernels.int8_linear(parts, bias)(x), wanted)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_stay_visible_in_int8(wrong: float) -> None:
    x = drawn(1, 8, 384)
    x[3, 200] = wrong
    layer = kernels.int8_linear([quantize_weight(drawn(2, 64, 384), "w")], drawn(3, 64))
    found = np.isfinite(layer(x)).all(1)
    assert found.tolist() == [row != 3 for row in range(8)]


def test_sums_of_eight_bits_are_exact_at_their_ends() -> None:
    """Every integer 127 or -127: no product saturates."""
    weight = quantize_weight(drawn(2, 64, 384), "w")
    hard = weight._replace(integers=np.where(weight.integers < 0, -127, 127).astype(np.int8))
    x = drawn(1, 3, 384)
    wanted = product(quantize_rows(x), hard, np.zeros(64, np.float32))
    np.testing.assert_array_equal(kernels.int8_linear([hard], np.zeros(64, np.float32))(x), wanted)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("parts", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("buckets", "farthest"), [(0, 20), (16, 128), (256, 512), (255, 150)])
def test_attention_by_distance(parts: tuple[bool, bool], buckets: int, farthest: int) -> None:
    """Compares lengths around tiles and blocks, and fewer keys than queries, with torch in float64."""
    heads, size = 2, 32
    relative = Disentangled(buckets, farthest, *parts, True, True)
    config = EncoderConfig(
        "", 9, heads * size, 1, heads, 9, "gelu", 400, 1, 1e-5, TensorNames(()), disentangled=relative
    )
    first, second = (drawn(i, 2 * relative.span, heads * size) if part else None for i, part in enumerate(parts))
    tables = first, second
    groups = [Group(0, 3, 1), Group(3, 2, 17), Group(37, 1, 96), Group(133, 1, 97, 50), Group(230, 1, 391)]
    qkv = drawn(5, 621, 3 * heads * size)
    qkv[:, : heads * size] *= 0.2
    own = Attention(config, HeadParts(distances=tables))(qkv, groups, Positions())
    reference = torch_attention.Attention(config, HeadParts(distances=tables))
    row_of = torch.from_numpy(relative_rows(relative, 400))
    for start, sequences, length, keys, *_ in groups:
        for place in range(start, start + sequences * length, length):
            q, k, v = double(qkv[place : place + length]).view(length, 3, heads, size).permute(1, 2, 0, 3)
            rows = row_of[torch.arange(length) - torch.arange(length)[:, None] + 399]
            scores = q @ k.transpose(1, 2)
            of_queries, of_keys = (
                None if table is None else double(table).view(-1, heads, size).permute(1, 2, 0) for table in tables
            )
            if of_queries is not None:
                scores += torch.gather(q @ of_queries, 2, rows.expand(heads, -1, -1))
            if of_keys is not None:
                scores += torch.gather(k @ of_keys, 2, rows.T.expand(heads, -1, -1)).transpose(1, 2)
            keys = keys or length
            wanted = (scores[:, :, :keys].softmax(-1) @ v[:, :keys]).transpose(0, 1).reshape(length, -1)
            torch.testing.assert_close(double(own[place : place + length]), wanted, atol=2e-5, rtol=0)
    found = reference(torch.from_numpy(qkv), groups, Positions())
    torch.testing.assert_close(found, torch.from_numpy(own), atol=2e-5, rtol=0)


CASES = (
    "bert", "nomic_bert", "modernbert", "mpnet", "deberta-v2", "deberta-v2, p2c", "qwen3", "gemma3_text", "lfm2",
    "embedding_gemma2",
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(("case", "pooling"), [*((case, None) for case in CASES), ("bert", "cls"), ("bert", "max")])
def test_bits_do_not_depend_on_the_batch(case: str, pooling: str | None, dtype: str, tmp_path: Path) -> None:
    wide: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 512, "num_attention_heads": 12}
    if case != "bert":
        wide = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    folder = build(tmp_path / "model", case, **wide, max_position_embeddings=202, tokenizer=small_tokenizer(64))
    model = engine.load_model(str(folder), pooling=pooling)
    # Without the padding token, whose position is not the next one.
    sequences = [np.maximum(ids, 4) for ids in random_sequences([3, 17, 60, 17, 1, 33, 100, 200], 64)]
    encoder = create_encoder(model, device="cpu", dtype=dtype)
    whole = encoder.wait(encoder.submit(engine.pack(sequences).with_tasks(Task.TOKENS)))[Task.TOKENS].values
    vectors = encoder.encode(engine.pack(sequences))
    starts = np.cumsum([0, *map(len, sequences)])
    for number, ids in enumerate(sequences):
        alone = engine.pack([ids])
        rows = encoder.wait(encoder.submit(alone.with_tasks(Task.TOKENS)))[Task.TOKENS].values
        np.testing.assert_array_equal(rows, whole[starts[number] : starts[number + 1]])
        np.testing.assert_array_equal(encoder.encode(alone)[0], vectors[number])
    encoder.close()


@pytest.mark.parametrize("int8", [False, True])
def test_whole_layer_is_its_parts(default_model: engine.Model, int8: bool) -> None:
    """To the bit: one kernel for all of it, and one for each part where only some rows go on after attention."""
    layer = Layer(default_model.config, Checkpoint.open(default_model), 3, KernelOperators(int8=int8))
    groups, x = [Group(0, 3, 7), Group(21, 1, 90, 40)], drawn(1, 111, 384)
    for positions in (Positions(), POSITIONS["biased"](12, 32)):
        whole, parts = layer(x, groups, positions), layer(x, groups, positions, rows=np.arange(111))
        assert np.array_equal(whole, parts)
    assert not np.array_equal(whole, layer(x, groups, Positions()))


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("groups", [[Group(0, 2, 9)], [Group(0, 2, 9), Group(18, 1, 212)]], ids=["18 rows", "230 rows"])
def test_bits_do_not_depend_on_the_threads(
    default_model: engine.Model, groups: list[Group], int8: bool, window: int | None
) -> None:
    """Each number of threads divides rows, columns and heads into other tasks."""
    layer = Layer(default_model.config, Checkpoint.open(default_model), 3, KernelOperators(int8=int8))
    x = drawn(1, 230, 384)[: 230 if len(groups) > 1 else 18]

    def run(threads: int) -> Floats:
        runs.allow_threads(threads)
        rows: Floats = layer(x, groups, Positions(window=window))
        return rows

    wanted = run(1)
    assert [threads for threads in (2, 3, 7, 16, 40) if not np.array_equal(run(threads), wanted)] == []


def test_callers_of_one_team_do_not_disturb_each_other() -> None:
    layer, x = kernels.linear(drawn(1, 512, 256), drawn(2, 512)), drawn(3, 90, 256)
    wanted = layer(x)

    def ask(number: int) -> bool:
        runs.allow_threads(1 + number % 4)
        return all(np.array_equal(layer(x), wanted) for _ in range(50))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(ask, range(24)))
