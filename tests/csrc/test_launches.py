"""What the encoder asks of the device, without one: recorded.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.csrc.recorded import (
    BERT,
    CLASSIFY,
    CLS,
    ELECTRA,
    EMBED,
    GTE,
    HOPPER,
    JINA,
    KINDS,
    LAST,
    LAYERS,
    LONG,
    MAX,
    MEAN,
    MODERN,
    MULTI,
    NOMIC,
    PORTABLE,
    SPARSE,
    TOKENS,
    built,
    everything,
    launches,
    names,
    only,
)

IN_FLOAT16, IN_FLOAT32, VECTORS_IN_FLOAT32 = range(3)  # the checkpoint

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("launches"))


@pytest.mark.parametrize("model", [BERT, MODERN, NOMIC, GTE, JINA])
def test_five_kernels_a_layer_on_hopper(program: Path, model: int) -> None:
    """RoPE, gates and LayerNorms are fused. test_computed_forwards.py compares what comes out."""
    called = names(launches(program, MEAN, HOPPER, LONG, model=model))
    layer = ["linear", "attention", "linear", "linear", "linear"]
    assert called == ["started", "copy", "offsets", "embedding", *layer * LAYERS, "pool", "submitted", "answered"]


def test_the_only_copies_are_the_batch_and_large_answers(program: Path) -> None:
    assert names(launches(program, MEAN, HOPPER, LONG)).count("copy") == 1
    assert (
        names(launches(program, MEAN, HOPPER, [1] * 100)).count("copy") == 2
    )  # too many answers to be written in place
    found = launches(program, MEAN, HOPPER, LONG, [300], LONG)
    assert not {"allocate", "synchronize"} & set(names(found)[1:])


def test_kernels_of_many_rows_take_turns_in_direction(program: Path) -> None:
    found = launches(program, MEAN, HOPPER, LONG)
    ways = [values["backwards"] for name, values in found if name in ("linear", "attention")]
    assert ways == [1 - i % 2 for i in range(5 * LAYERS)]
    assert only(found, "embedding")[0]["backwards"] == 0


@pytest.mark.parametrize("gemm", [HOPPER, PORTABLE])
@pytest.mark.parametrize(("pooling", "queries"), [(CLS, 1), (LAST, 2)])
def test_after_the_last_attention_only_pooled_rows_go_on(program: Path, gemm: str, pooling: int, queries: int) -> None:
    found = launches(program, pooling, gemm, LONG)
    tokens, texts = sum(LONG), len(LONG)
    assert [each["queries"] for each in only(found, "attention")] == [0, 0, queries]
    (gather,) = only(found, "gather")
    assert (gather["pooling"], gather["rows"]) == (pooling, texts)
    products = only(found, "linear")
    assert [each["rows"] for each in products] == [tokens] * (4 * LAYERS - 3) + [texts] * 3
    assert (products[-3]["x"], products[-3]["residual"]) == (gather["y"], gather["y_residual"])
    assert products[-3]["residual_sums"] == gather["y_stats"]
    assert only(found, "pool")[0]["gathered"] == 1


@pytest.mark.parametrize(
    ("pooling", "batch", "task"),
    [
        (MEAN, LONG, EMBED),
        (MAX, LONG, EMBED),
        (CLS, [100, 27], EMBED),
        (CLS, [1] * 200, EMBED),
        (CLS, LONG, TOKENS),
        (CLS, LONG, EMBED | SPARSE),
        (CLS, LONG, CLASSIFY | MULTI),
        (MEAN, LONG, EMBED | CLASSIFY),
        (LAST, LONG, EMBED | CLASSIFY),
    ],
)
def test_else_all_rows_go_on(program: Path, pooling: int, batch: list[int], task: int) -> None:
    found = launches(program, pooling, HOPPER, [(length, task) for length in batch], heads=CLASSIFY | SPARSE | MULTI)
    assert not only(found, "gather")
    assert {each["rows"] for each in only(found, "linear")} == {sum(batch)}
    assert {each["queries"] for each in only(found, "attention")} == {0}
    assert all(each["gathered"] == 0 for each in only(found, "pool"))


def test_at_load_every_row_before_a_layernorm_is_looked_at_once(program: Path) -> None:
    found = everything(program, CLS, HOPPER, [20])
    start = found[: names(found).index("started")]
    assert [each["rows"] for each in only(start, "row_offsets")] == [4096] * (1 + 2 * LAYERS)
    assert len(only(start, "gather")) == 1  # in the second batch, so that its kernel is loaded


def test_small_batches_are_one_graph(program: Path) -> None:
    found = launches(program, MEAN, HOPPER, [20], [100, 27], [512], [500, 508, 500], [1] * 65, graphs=True)
    assert found[0] == ("started", {"graphs": 120})
    per_batch = " ".join(names(found)[1:]).split("submitted")
    assert [part.split().count("graph") for part in per_batch] == [1, 1, 1, 0, 0, 0]
    assert [part.split().count("pool") for part in per_batch] == [0, 0, 0, 1, 1, 0]


def test_few_rows_are_embedded_by_the_launch_that_fetches_them(program: Path) -> None:
    captured = everything(program, MEAN, HOPPER, [20], graphs=True)
    small, apart = only(captured, "embedding_small"), only(captured, "offsets")[2:]  # after the two batches at start
    assert len(small) + len(apart) == 120
    assert {each["rows"] for each in small} == {16, 32, 48, 64, 96, 128}
    assert min(each["tokens"] for each in apart) == 192
    assert all(each["y_stats"] >= 0 for each in small)
    assert not only(everything(program, MEAN, PORTABLE, [20], graphs=True), "embedding_small")
    assert not only(launches(program, MEAN, HOPPER, [20]), "embedding_small")  # without graphs it is copied first


def test_pooling_knows_how_long_a_text_may_be(program: Path) -> None:
    assert [each["longest"] for each in only(launches(program, MEAN, HOPPER, LONG, [7, 3]), "pool")] == [500, 7]
    captured = only(everything(program, MEAN, HOPPER, [20], graphs=True), "pool")[2:]
    assert {each["longest"] for each in captured} == {
        16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512,  # not 640 to 1 024: the model has 512 positions
    }  # fmt: skip


def test_two_batches_are_in_flight_in_slots_of_their_own(program: Path) -> None:
    found = launches(program, MEAN, HOPPER, LONG, [300], LONG, [40, 400])
    tickets = [each["ticket"] for each in only(found, "submitted")]
    assert len(set(tickets)) == 4
    answers = [each["y"] for each in only(found, "pool")]
    assert answers[0] != answers[1]
    assert answers[2:] == answers[:2]


def test_attention_is_given_its_tiles(program: Path) -> None:
    (first, *_) = only(launches(program, MEAN, HOPPER, [64, 65, 33, 32, 1]), "attention")
    assert (first["tiles"], first["shorts"]) == (1 + 2 + 1, 2)
    assert names(launches(program, MEAN, HOPPER, []))[1:] == ["submitted", "answered"]


def test_weights_are_folded_from_what_the_checkpoint_has(program: Path) -> None:
    def prepared(gemm: str) -> list[list[dict[str, int]]]:
        """By layer: QKV, attention out, FFN in, FFN out."""
        of_all = only(everything(program, MEAN, gemm, [20], stored=IN_FLOAT32), "prepare")
        assert len(of_all) == 4 * LAYERS
        return [of_all[i : i + 4] for i in range(0, len(of_all), 4)]

    for layer, (qkv, attention_out, wide, out) in enumerate(prepared(HOPPER)):
        assert [qkv[each] for each in ("first", "second", "third", "last")] == [10 * layer + i for i in (1, 2, 3, 3)]
        assert {wide[each] for each in ("first", "second", "third", "last")} == {10 * layer + 4}
        assert attention_out["exact"] == out["exact"] == -1
    # Other products fold nothing.
    for of_layer in prepared(PORTABLE):
        assert {each[name] for each in of_layer for name in ("exact", "normed", "residual_normed")} == {-1}


@pytest.mark.parametrize("stored", [IN_FLOAT16, IN_FLOAT32, VECTORS_IN_FLOAT32])
def test_gamma_goes_into_rows_where_neither_it_nor_a_weight_is_rounded(program: Path, stored: int) -> None:
    in_rows = stored == IN_FLOAT16
    found = everything(program, MEAN, HOPPER, [500] * 4, stored=stored, graphs=1)
    for name in ("embedding", "embedding_small", "prepare"):
        assert {each["prescaled_rows"] for each in only(found, name)} == {int(in_rows)}
    products = only(found, "prepare")
    assert len(products) == 4 * LAYERS
    for i in range(0, len(products), 4):
        qkv, attention_out, wide, out = products[i : i + 4]
        assert attention_out["residual_normed"] == qkv["normed"] >= 0
        assert out["residual_normed"] == wide["normed"] >= 0
        assert (qkv["exact"] == -1) == (wide["exact"] == -1) == in_rows
        # What a product leaves is times the gamma that its readers expect; pooling takes the last rows as they are.
        following = products[i + 4]["normed"] if i + 4 < len(products) else -1
        assert attention_out["next_gamma"] == (wide["normed"] if in_rows else -1)
        assert out["next_gamma"] == (following if in_rows else -1)


def test_attention_knows_the_longest_text_where_positions_are_rotary(program: Path) -> None:
    """Its tiles depend on it. Models that had run before there were such tiles keep theirs."""
    for model, longest in ((NOMIC, {max(LONG)}), (MODERN, {max(LONG)}), (None, {0})):
        chosen = {} if model is None else {"model": model}
        found = only(launches(program, MEAN, HOPPER, LONG, **chosen), "attention")
        assert {each["longest"] for each in found} == longest


def test_few_rows_are_embedded_apart_where_their_positions_are_needed(program: Path) -> None:
    for model, small in ((BERT, True), (JINA, True), (NOMIC, False), (MODERN, False), (ELECTRA, False)):
        captured = everything(program, MEAN, HOPPER, [20], model=model, graphs=EMBED)
        assert bool(only(captured, "embedding_small")) == small, model


@pytest.mark.parametrize("gemm", [HOPPER, PORTABLE])
@pytest.mark.parametrize("model", KINDS)
def test_each_product_asks_for_the_weights_after_the_next(program: Path, model: int, gemm: str) -> None:
    products = only(everything(program, MEAN, gemm, LONG, model=model), "prepare")[-4 * LAYERS :]
    for i, each in enumerate(products):
        later = products[(i + 2) % len(products)]
        assert each["ahead"] == later["weight"]
        assert each["prefetch_bytes"] == 2 * later["in"] * later["out"] * (2 if later["gated"] else 1)
