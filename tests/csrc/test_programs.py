"""Forwards of encoders newer than BERT, as lists of launches, without a device: recorded.py."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.csrc.recorded import (
    ALBERT,
    BERT,
    CLS,
    ELECTRA,
    EMBED,
    GTE,
    HIDDEN,
    HOPPER,
    JINA,
    LAYERS,
    LONG,
    MEAN,
    MODERN,
    NOMIC,
    PORTABLE,
    PORTABLE_FLOAT32,
    RELATIVE,
    TOKENS,
    Launch,
    built,
    everything,
    launches,
    names,
    only,
)

INNER, HEADS, TURNED, WINDOW, EMBEDDING = 1024, 4, 48, 40, 128  # recording_device.h
IN_FLOAT16, IN_FLOAT32, _, BY_ROWS = range(4)  # the checkpoint
SILU = 4
KINDS = (BERT, RELATIVE, MODERN, NOMIC, GTE, ELECTRA, ALBERT, JINA)
KERNELS = ("embedding", "embedding_small", "linear", "rope", "attention", "gate", "layernorm", "gather", "pool")

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("programs"))


def of_layers(found: list[Launch]) -> list[str]:
    """The launches after the embedding and before pooling."""
    called = names(found)
    return called[called.index("embedding") + 1 : called.index("pool")]


@pytest.mark.parametrize("model", [MODERN, NOMIC, GTE, JINA])
def test_five_kernels_a_layer_on_hopper(program: Path, model: int) -> None:
    layer = ["linear", "attention", "linear", "linear", "linear"]
    assert of_layers(launches(program, MEAN, HOPPER, LONG, model=model)) == layer * LAYERS


def test_a_projection_is_one_product_more(program: Path) -> None:
    layer = ["linear", "attention", "linear", "linear", "linear"]
    found = launches(program, MEAN, HOPPER, LONG, model=ELECTRA)
    assert of_layers(found) == ["linear", *layer * LAYERS]
    (embedding,), projection = only(found, "embedding"), only(found, "linear")[0]
    assert (embedding["columns"], projection["in"], projection["out"]) == (EMBEDDING, EMBEDDING, HIDDEN)
    # It is given normalized rows, and leaves some that no LayerNorm follows.
    assert embedding["y_stats"] == projection["sums"] == projection["y_stats"] == -1
    assert [each["residual_sums"] == -1 for each in only(found, "linear")[2:6]] == [True, True, False, True]


@pytest.mark.parametrize(
    ("model", "layer"),
    [
        (NOMIC, ["linear", "rope", "attention", "linear", "layernorm", "linear", "gate", "linear", "layernorm"]),
        (GTE, ["linear", "rope", "attention", "linear", "layernorm", "linear", "gate", "linear", "layernorm"]),
        (JINA, ["linear", "attention", "linear", "layernorm", "linear", "gate", "linear", "layernorm"]),
    ],
)
def test_what_portable_products_do_not_do_are_kernels(program: Path, model: int, layer: list[str]) -> None:
    found = launches(program, MEAN, PORTABLE, LONG, model=model)
    assert of_layers(found) == layer * LAYERS
    for gate in only(found, "gate"):
        assert (gate["rows"], gate["columns"]) == (sum(LONG), INNER)
        assert gate["activation"] == (SILU if model == NOMIC else 1)
        assert gate["y"] - gate["x"] >= 2 * INNER * 2 * sum(LONG)  # one does not write over the other
    for call in only(found, "rope"):
        assert (call["rows"], call["pitch"], call["columns"]) == (sum(LONG), 3 * HIDDEN, 2 * HIDDEN)
        assert (call["head_size"], call["rotary_dim"]) == (HIDDEN // HEADS, TURNED)


def test_norms_that_come_before_are_kernels_on_the_portable_path(program: Path) -> None:
    found = launches(program, MEAN, PORTABLE, LONG, model=MODERN)
    layer = ["layernorm", "linear", "rope", "attention", "linear", "layernorm", "linear", "gate", "linear"]
    # The first layer has none before attention; one follows the last layer.
    assert of_layers(found) == [*layer[1:], *layer * (LAYERS - 1), "layernorm"]
    (embedding,) = only(found, "embedding")
    stream = embedding["y"]
    for name, each in found:
        if name == "linear" and each["residual"] >= 0:
            assert each["residual"] == each["y"] == stream  # the rows themselves, in place
    norms = only(found, "layernorm")
    assert all(each["x"] == stream != each["y"] for each in norms[:-1])
    assert norms[-1]["x"] == norms[-1]["y"] == stream
    assert len({each["gamma"] for each in norms}) == len(norms) == 2 * LAYERS


def test_norms_that_come_before_are_folded_on_hopper(program: Path) -> None:
    found = everything(program, MEAN, HOPPER, LONG, model=MODERN, stored=IN_FLOAT16)
    products = only(found, "prepare")
    assert len(products) == 4 * LAYERS
    for i, (qkv, attention_out, inner, out) in enumerate(_fours(products)):
        assert (qkv["normed"] >= 0) == (i > 0)
        assert inner["normed"] >= 0
        # A residual is added as it is. So no gamma may be in its rows, although these weights have 16 bits.
        assert attention_out["residual_normed"] == out["residual_normed"] == -1
        assert {each["prescaled_rows"] for each in (qkv, attention_out, inner, out)} == {0}
        assert (qkv["exact"] >= 0) == (i > 0)
        assert inner["exact"] >= 0
    run = launches(program, MEAN, HOPPER, LONG, model=MODERN)
    for _, attention_out, inner, out in _fours(only(run, "linear")):
        assert attention_out["residual_sums"] == out["residual_sums"] == -1
        assert attention_out["y_stats"] == inner["sums"] >= 0
        assert out["residual"] == attention_out["y"]
    assert only(run, "pool")[0]["normed"] == 1  # the last one


def _fours(products: list[dict[str, int]]) -> list[list[dict[str, int]]]:
    return [products[i : i + 4] for i in range(0, len(products), 4)]


@pytest.mark.parametrize("pooling", [CLS, MEAN])
@pytest.mark.parametrize("gemm", [HOPPER, PORTABLE])
@pytest.mark.parametrize("model", KINDS)
def test_every_kernel_reads_what_was_left_for_it(program: Path, model: int, gemm: str, pooling: int) -> None:
    """By address: x is what the kernel before wrote, residuals are the rows of before."""
    found = launches(program, pooling, gemm, LONG, model=model)
    kernels = [each for each in found if each[0] in KERNELS]
    written: dict[int, int] = {}  # address → sums with it
    for (earlier, before), (name, after) in itertools.pairwise(kernels):
        written[before["y"]] = before.get("y_stats", -1)
        if earlier == "gather":
            written[before["y_residual"]], written[before["y"]] = before["y_stats"], -1
        assert after["x"] == before["y"], name
        sums = after.get("residual_sums", -1) if name == "linear" else after.get("sums", -1)
        if after.get("residual", -1) >= 0:
            assert sums in (-1, written[after["residual"]]), name
        else:
            assert after.get("sums", -1) in (-1, written[after["x"]]), name
        if name not in ("layernorm", "rope"):
            assert after["y"] != after["x"]
    assert (len(only(found, "gather")) == 1) == (pooling == CLS)


@pytest.mark.parametrize("gemm", [HOPPER, PORTABLE])
def test_layers_have_windows_and_angles_of_their_own(program: Path, gemm: str) -> None:
    found = everything(program, MEAN, gemm, LONG, model=MODERN)
    assert [each["window"] for each in only(found, "attention")[-LAYERS:]] == [0, WINDOW, WINDOW]
    rope = "rope" if gemm == PORTABLE else "prepare"
    tables = [each["table"] for each in only(found, rope) if "table" in each][-LAYERS:]
    assert tables[1] == tables[2] == tables[0] + 512 * TURNED // 2 * 8  # neighbors: [512, 24] of 8 bytes
    assert len({each["positions"] for each in only(found, rope) if "positions" in each}) == 1
    assert {each["window"] for each in only(launches(program, MEAN, gemm, LONG, model=NOMIC), "attention")} == {0}


def test_attention_knows_the_longest_text_where_positions_are_rotary(program: Path) -> None:
    """Its tiles depend on it. Models that had run before there were such tiles keep theirs."""
    for model, longest in ((NOMIC, {max(LONG)}), (MODERN, {max(LONG)}), (None, {0})):
        chosen = {} if model is None else {"model": model}
        found = only(launches(program, MEAN, HOPPER, LONG, **chosen), "attention")
        assert {each["longest"] for each in found} == longest


@pytest.mark.parametrize("model", [MODERN, NOMIC, JINA])
def test_without_a_table_of_positions_all_rows_read_the_same_zeros(program: Path, model: int) -> None:
    (embedding,) = only(launches(program, MEAN, PORTABLE, LONG, model=model), "embedding")
    ropes = only(launches(program, MEAN, PORTABLE, LONG, model=model), "rope")
    assert all(embedding["positions"] != each["positions"] for each in ropes)


def test_few_rows_are_embedded_apart_where_their_positions_are_needed(program: Path) -> None:
    for model, small in ((BERT, True), (JINA, True), (NOMIC, False), (MODERN, False), (ELECTRA, False)):
        captured = everything(program, MEAN, HOPPER, [20], model=model, graphs=EMBED)
        assert bool(only(captured, "embedding_small")) == small, model


def test_shared_layers_are_prepared_without_folding(program: Path) -> None:
    found = everything(program, MEAN, HOPPER, LONG, model=ALBERT, stored=IN_FLOAT32)
    products = only(found, "prepare")[1:]  # after the projection
    assert {each["normed"] for each in products} == {each["exact"] for each in products} == {-1}
    assert [len({of[i]["weight"] for of in _fours(products)}) for i in range(4)] == [1] * 4


@pytest.mark.parametrize("gemm", [HOPPER, PORTABLE])
@pytest.mark.parametrize("model", KINDS)
def test_each_product_asks_for_the_weights_after_the_next(program: Path, model: int, gemm: str) -> None:
    products = only(everything(program, MEAN, gemm, LONG, model=model), "prepare")[-4 * LAYERS :]
    for i, each in enumerate(products):
        later = products[(i + 2) % len(products)]
        assert each["ahead"] == later["weight"]
        assert each["prefetch_bytes"] == 2 * later["in"] * later["out"] * (2 if later["gated"] else 1)


@pytest.mark.parametrize("gemm", [HOPPER, PORTABLE_FLOAT32])
def test_rows_are_in_the_order_that_products_want(program: Path, gemm: str) -> None:
    """With the numbers of rows as weights: pairs that are turned together, gates and values side by side."""
    products = only(everything(program, MEAN, gemm, [20], model=GTE, stored=BY_ROWS), "prepare")
    size = HIDDEN // HEADS
    column = np.arange(HIDDEN) % size
    own = np.arange(HIDDEN) - column + np.where(column < TURNED, column // 2 + column % 2 * (TURNED // 2), column)
    inner = np.arange(INNER)
    for layer, (qkv, _, wide, _) in enumerate(_fours(products)):
        query, key, value = (1000 * (10 * layer + i) for i in (1, 2, 3))
        wanted = np.concatenate([query + own, key + own, value + np.arange(HIDDEN)])
        pairs = np.stack([1000 * (10 * layer + 5) + inner, 1000 * (10 * layer + 4) + inner], axis=1).reshape(-1)
        for of in ("row", "bias"):
            np.testing.assert_array_equal([qkv[f"{of}{i}"] for i in range(3 * HIDDEN)], wanted)
            np.testing.assert_array_equal([wide[f"{of}{i}"] for i in range(2 * INNER)], pairs)


def test_turning_neighbours_is_what_turning_halves_was() -> None:
    """The arithmetic of the order: scores of turned queries and keys do not change."""
    random = np.random.default_rng(3)
    size = HIDDEN // HEADS
    queries, keys = random.standard_normal((2, size)), random.standard_normal((2, size))
    order = np.array([c // 2 + c % 2 * (TURNED // 2) if c < TURNED else c for c in range(size)])
    angles = random.standard_normal((2, TURNED // 2))

    def halves(x: np.ndarray, at: int) -> np.ndarray:
        low, high = x[: TURNED // 2], x[TURNED // 2 : TURNED]
        cos, sin = np.cos(angles[at]), np.sin(angles[at])
        return np.concatenate([low * cos - high * sin, high * cos + low * sin, x[TURNED:]])

    def neighbors(x: np.ndarray, at: int) -> np.ndarray:
        y = x.copy()
        cos, sin = np.cos(angles[at]), np.sin(angles[at])
        y[0:TURNED:2] = x[0:TURNED:2] * cos - x[1:TURNED:2] * sin
        y[1:TURNED:2] = x[1:TURNED:2] * cos + x[0:TURNED:2] * sin
        return y

    for i, j in itertools.product(range(2), range(2)):
        wanted = halves(queries[i], i) @ halves(keys[j], j)
        np.testing.assert_allclose(neighbors(queries[i][order], i) @ neighbors(keys[j][order], j), wanted)


@pytest.mark.parametrize("gemm", [HOPPER, PORTABLE])
@pytest.mark.parametrize("model", KINDS)
def test_token_vectors_are_normalized_once(program: Path, model: int, gemm: str) -> None:
    batch = [(length, TOKENS) for length in LONG]
    plain = names(launches(program, MEAN, gemm, LONG, model=model)).count("layernorm")
    found = names(launches(program, MEAN, gemm, batch, model=model)).count("layernorm")
    folds = gemm == HOPPER and model != ALBERT
    assert found - plain == int(folds)
