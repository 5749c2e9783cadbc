"""The launches of heads without a device, and their sequences: recorded.py."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.csrc.recorded import (
    CLASSIFY,
    CLS,
    EMBED,
    HIDDEN,
    HOPPER,
    LAST,
    LAYERS,
    LONG,
    MEAN,
    MULTI,
    PORTABLE,
    QWEN,
    SPARSE,
    TOKENS,
    Batch,
    Launch,
    built,
    everything,
    launches,
    names,
    only,
)

ALL = EMBED | TOKENS | CLASSIFY | SPARSE | MULTI
DENSE, LABELS, COLUMNS = 64, 3, 128  # columns of EMBED, CLASSIFY and MULTI: recorded_forwards.cpp
IDENTITY, TANH, RELU = range(3)
SPLADE, OVERFLOWING, TOKEN_LOGITS = 32, 64, 128  # heads: recorded_forwards.cpp

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("heads"))


def all_of(lengths: list[int], tasks: int) -> Batch:
    return [(length, tasks) for length in lengths]


def after_layers(found: list[Launch]) -> list[Launch]:
    """The launches after the last layer's products, of one batch."""
    last = max(i for i, (name, values) in enumerate(found) if name == "linear" and values["residual"] >= 0)
    return found[last + 1 : names(found).index("submitted")]


@pytest.mark.parametrize("pooling", [CLS, MEAN, LAST])
def test_first_rows_go_through_the_classification_head(program: Path, pooling: int) -> None:
    found = launches(program, pooling, HOPPER, all_of(LONG, CLASSIFY), heads=CLASSIFY)
    assert only(found, "gather")[0]["pooling"] == CLS
    assert [each["queries"] for each in only(found, "attention")] == [0] * (LAYERS - 1) + [1]
    end = after_layers(found)
    assert names(end) == ["pool", "dense", "dense"]
    pool, first, second = (values for _, values in end)
    assert (pool["pooling"], pool["gathered"], pool["cut"], pool["chosen"]) == (CLS, 1, 0, -1)
    assert (first["x"], second["x"]) == (pool["y"], first["y"])
    assert (first["activation"], second["activation"]) == (TANH, IDENTITY)
    assert (first["in"], first["out"], second["in"], second["out"]) == (HIDDEN, HIDDEN, HIDDEN, LABELS)
    assert second["pitch"] == LABELS
    assert found[-1] == ("finished", {f"rows{CLASSIFY}": len(LONG), f"columns{CLASSIFY}": LABELS})
    assert names(found).count("copy") == 1  # logits are written to host memory, as vectors are


@pytest.mark.parametrize("task", [CLASSIFY, EMBED])
def test_only_last_rows_of_a_decoder_go_through_the_end(program: Path, task: int) -> None:
    """Its last norm too, which heads do not apply: RMSNorm."""
    found = launches(program, LAST, HOPPER, all_of(LONG, task), heads=CLASSIFY, model=QWEN)
    layer = ["linear", "qk_norm", "attention", "linear", "linear", "linear"]
    middle = names(found)[names(found).index("embed_words") + 1 : names(found).index("rmsnorm")]
    assert [name for name in middle if name != "gather"] == layer * LAYERS
    (gather,), (norm,) = only(found, "gather"), only(found, "rmsnorm")
    assert (gather["pooling"], gather["rows"], norm["rows"]) == (LAST, len(LONG), len(LONG))
    pool = only(found, "pool")[0]
    assert (pool["pooling"], pool["gathered"], pool["normed"], pool["sums"]) == (LAST, 1, 0, -1)
    qkv, attention_out = only(found, "linear")[:2]
    assert (qkv["in"], qkv["out"]) == (HIDDEN, 4 * HIDDEN)  # two heads of queries for each of keys, twice as wide
    assert (attention_out["in"], attention_out["out"]) == (2 * HIDDEN, HIDDEN)
    (first, *_) = only(found, "qk_norm")
    assert (first["pitch"], first["heads"], first["columns"]) == (4 * HIDDEN, 4, 3 * HIDDEN)


def test_two_tasks_may_share_the_gathered_rows(program: Path) -> None:
    batch = [(500, EMBED), (400, CLASSIFY), (300, EMBED | CLASSIFY), (20, EMBED), (33, EMBED)]
    found = launches(program, CLS, HOPPER, batch, heads=CLASSIFY)
    assert len(only(found, "gather")) == 1
    embed, classify = only(found, "pool")
    assert embed["gathered"] == classify["gathered"] == 1
    assert (embed["chosen"], embed["first"], embed["last"]) == (4, 0, 4)
    assert (classify["chosen"], classify["first"], classify["last"]) == (2, 1, 2)
    assert (embed["cut"], classify["cut"]) == (1, 0)


def test_logits_of_tokens_have_a_norm_between_two_products_and_any_length(program: Path) -> None:
    found = launches(program, MEAN, HOPPER, [(20, MULTI), (30, EMBED)], heads=MULTI | TOKEN_LOGITS)
    end = after_layers(found)
    assert names(end) == ["pool", "layernorm", "linear", "layernorm", "linear", "token_rows", "copy"]
    first, second = only(end, "linear")
    _, norm = only(end, "layernorm")
    (rows,) = only(end, "token_rows")
    assert (norm["x"], norm["y"]) == (first["y"], first["y"])
    assert (second["x"], rows["x"]) == (first["y"], second["y"])
    assert (first["out"], second["out"], rows["columns"]) == (HIDDEN, COLUMNS, COLUMNS)
    assert (rows["unit_length"], rows["rows"]) == (0, 20)


@pytest.mark.parametrize("gemm", [HOPPER, PORTABLE])
def test_each_head_runs_for_those_who_want_it(program: Path, gemm: str) -> None:
    batch = [(20, EMBED), (30, CLASSIFY), (40, EMBED | MULTI), (10, TOKENS | SPARSE)]
    found = launches(program, MEAN, gemm, batch, heads=CLASSIFY | SPARSE | MULTI)
    end = after_layers(found)
    normed = ["layernorm"]  # where they are separate, the last layer's own; else for the heads that follow
    heads = ["pool", "pool", "dense", "dense", "token_weights"]
    rest = ["linear", "token_rows", "token_rows", "copy", "copy"]
    assert names(end) == ([*heads, *normed, *rest] if gemm == HOPPER else [*normed, *heads, *rest])
    embed, classify = only(end, "pool")
    (weights,) = only(end, "token_weights")
    (product,) = only(end, "linear")
    multi, tokens = only(end, "token_rows")
    chosen = [(each["chosen"], each["first"], each["last"]) for each in (embed, classify, weights, multi, tokens)]
    assert chosen == [(2, 0, 2), (1, 1, 1), (10, 90, 99), (40, 50, 89), (10, 90, 99)]
    assert (product["rows"], product["out"], product["x"]) == (100, COLUMNS, tokens["x"])
    assert multi["x"] == product["y"]
    assert (multi["unit_length"], multi["columns"]) == (1, COLUMNS)
    assert (tokens["unit_length"], tokens["columns"]) == (0, HIDDEN)
    assert weights["normed"] == (gemm == HOPPER)
    assert (weights["sums"] >= 0) == (gemm == HOPPER)
    finished = found[-1][1]
    assert {key: finished[f"rows{key}"] for key in (EMBED, TOKENS, CLASSIFY, SPARSE, MULTI)} == {
        EMBED: 2, TOKENS: 10, CLASSIFY: 1, SPARSE: 10, MULTI: 40,
    }  # fmt: skip


def test_outputs_lie_apart(program: Path) -> None:
    found = launches(program, CLS, HOPPER, all_of([3] * 90, ALL), heads=CLASSIFY | SPARSE | MULTI)
    sizes = {
        only(found, "pool")[0]["y"]: 90 * HIDDEN,
        only(found, "dense")[1]["y"]: 90 * LABELS,
        only(found, "token_weights")[0]["y"]: 270,
        only(found, "token_rows")[0]["y"]: 270 * COLUMNS,
    }
    assert len(sizes) == 4
    for (one, size), (other, _) in itertools.pairwise(sorted(sizes.items())):
        assert other - one >= 4 * size
        assert other % 256 == 0
    assert {each["chosen"] for name, each in found if "chosen" in each} == {-1}
    assert names(found).count("copy") == 3  # no lists: the batch, token vectors, the rest


@pytest.mark.parametrize("count", [5, 100])
def test_dense_modules_follow_pooling(program: Path, count: int) -> None:
    found = launches(program, MEAN, HOPPER, [7] * count, heads=EMBED)
    end = after_layers(found)
    assert names(end) == ["pool", "dense", "dense", "cut", *(["copy"] if count > 64 else [])]
    pool, first, second, cut = (values for _, values in end[:4])
    assert (first["x"], second["x"], cut["x"]) == (pool["y"], first["y"], second["y"])
    assert (first["pitch"], second["pitch"], cut["width"]) == (100, DENSE, DENSE)  # rows of 99 are padded
    assert pool["cut"] == 0
    assert (first["activation"], second["activation"]) == (RELU, IDENTITY)
    assert found[-1][1] == {"rows1": count, "columns1": DENSE}


def test_small_batches_of_one_task_are_graphs(program: Path) -> None:
    some: list[Batch] = [
        all_of([20, 3], EMBED), all_of([20, 3], CLASSIFY), [(20, EMBED), (3, CLASSIFY)], all_of([20], EMBED | CLASSIFY),
        all_of([20], SPARSE),
    ]  # fmt: skip
    found = launches(program, CLS, HOPPER, *some, graphs=EMBED | CLASSIFY, heads=CLASSIFY | SPARSE)
    assert found[0] == ("started", {"graphs": 240})
    per_batch = " ".join(names(found)[1:]).split("submitted")
    assert [part.split().count("graph") for part in per_batch] == [1, 1, 0, 0, 0, 0]
    assert launches(program, CLS, HOPPER, graphs=CLASSIFY, heads=CLASSIFY)[0][1] == {"graphs": 120}
    assert launches(program, CLS, HOPPER, graphs=CLASSIFY)[0][1] == {"graphs": 0}  # no such head
    captured = everything(program, MEAN, HOPPER, graphs=CLASSIFY, heads=CLASSIFY)
    logits = {each["y"] for each in only(captured, "dense")[1::2]}
    assert len(logits) <= 4  # two slots' own places: captured, and of the batches at start


def test_at_load_every_head_has_run_and_has_its_memory(program: Path) -> None:
    heads = CLASSIFY | SPARSE | MULTI
    found = everything(program, CLS, HOPPER, all_of([512] * 8, EMBED | heads), all_of([512] * 8, heads), heads=heads)
    start = names(found)[: names(found).index("started")]
    assert {"pool", "dense", "token_weights", "token_rows"} <= set(start)
    assert "allocate" not in names(found)[len(start) :]
    products = only(found, "prepare")
    assert [(each["in"], each["out"]) for each in products[4 * LAYERS :]] == [(HIDDEN, COLUMNS)]
    assert (products[-1]["normed"], products[-1]["exact"]) == (-1, -1)


SPLADE_LAUNCHES = ["layernorm", "linear", "layernorm", "begin_maxima", "maxima", "count_pairs", "write_pairs"]


@pytest.mark.parametrize("count", [5, 100])
def test_splade_follows_the_last_layernorm(program: Path, count: int) -> None:
    found = launches(program, CLS, HOPPER, all_of([33] * count, SPARSE), heads=SPLADE)
    end = after_layers(found)
    assert names(end) == SPLADE_LAUNCHES
    last, transform, norm, begin, maxima, _, write = (values for _, values in end)
    assert (transform["in"], transform["out"], transform["rows"]) == (HIDDEN, HIDDEN, 33 * count)
    assert transform["x"] == last["y"]
    assert (norm["x"], norm["y"], maxima["x"]) == (transform["y"], transform["y"], transform["y"])
    assert transform["y"] != last["y"]
    assert (begin["chosen"], begin["texts"], begin["end"], begin["pitch"]) == (-1, count, 33 * count, 1024)
    assert (maxima["row"], maxima["rows"], maxima["text_of"]) == (0, 33 * count, begin["text_of"])
    assert (write["goes_on"], write["logs"]) == (0, 1)
    assert found[-1][1] == {"rows8": 2 * count, "columns8": 1}
    assert not only(found, "gather")


def test_splade_runs_for_those_who_want_it(program: Path) -> None:
    wants: Batch = [(300, EMBED), (500, SPARSE), (20, EMBED), (33, SPARSE | EMBED), (17, MULTI)]
    found = launches(program, CLS, HOPPER, wants, heads=SPLADE | MULTI)
    (begin,), (maxima,) = only(found, "begin_maxima"), only(found, "maxima")
    assert begin["chosen"] >= 0
    assert (begin["texts"], begin["end"]) == (2, 853)
    assert (maxima["all_rows"], maxima["row"], maxima["rows"]) == (870, 300, 553)
    assert found[-1][1] == {
        "rows1": 3,
        "columns1": HIDDEN,
        "rows16": 17,
        "columns16": COLUMNS,
        "rows8": 4,
        "columns8": 1,
    }


def test_splade_takes_many_texts_in_groups(program: Path) -> None:
    found = launches(program, CLS, HOPPER, all_of([1] * 1500 + [2] * 700, SPARSE), heads=SPLADE)
    groups = [(each["text"], each["texts"], each["end"]) for each in only(found, "begin_maxima")]
    assert groups == [(0, 1024, 1024), (1024, 1024, 2596), (2048, 152, 2900)]
    assert [(each["row"], each["rows"], each["text"]) for each in only(found, "maxima")] == [
        (0, 1024, 0), (1024, 1572, 1024), (2596, 304, 2048),
    ]  # fmt: skip
    assert [each["goes_on"] for each in only(found, "write_pairs")] == [0, 1, 1]
    assert found[-1][1] == {"rows8": 4400, "columns8": 1}


@pytest.mark.parametrize("others", [0, EMBED])
def test_texts_whose_pairs_do_not_fit_run_again(program: Path, others: int) -> None:
    """There is room for two texts' pairs."""
    batch: Batch = [
        (length, SPARSE | others if i != 3 else EMBED) for i, length in enumerate([20, 33, 15, 500, 70, 40])
    ]
    found = launches(program, CLS, HOPPER, batch, heads=OVERFLOWING)
    runs = [(each["texts"], each["chosen"] >= 0, each["end"]) for each in only(found, "begin_maxima")]
    assert runs == [(5, True, 678), (2, False, 85), (1, False, 40)]
    assert [each["tokens"] for each in only(found, "offsets")] == [678, 85, 40]
    pairs = 5 * ((8 << 20) // 3 + 1)
    assert found[-1][1]["rows8"] == pairs
    assert found[-1][1]["rows1"] == (6 if others else 1)
    assert names(found).count("finished") == 1


def test_splade_has_its_memory_and_has_run_at_load(program: Path) -> None:
    found = everything(program, CLS, HOPPER, all_of([512] * 8, SPARSE), heads=SPLADE)
    start = names(found)[: names(found).index("started")]
    assert set(SPLADE_LAUNCHES) <= set(start)
    assert "allocate" not in names(found)[len(start) :]
    (prepared,) = only(found, "prepare_maxima")
    assert (prepared["in"], prepared["out"]) == (HIDDEN, 1000)
