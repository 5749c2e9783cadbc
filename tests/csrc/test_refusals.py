"""Errors of the encoder's host side, on a stand-in for a device (recording_device.h)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.csrc.host_program import HOST_SIDE, build, output_of

NOTHING_LIVES = "living 0 0 0 0 0"

pytestmark = pytest.mark.timeout(600)  # compilers, on cores that others may use


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("refusals"), Path(__file__).with_name("recorded_refusals.cpp"), *HOST_SIDE)


def told(program: Path, scenario: str) -> list[str]:
    """The output of the scenario's steps. A failure leaves no memory, stream, event or graph behind."""
    lines = output_of(program, scenario).splitlines()
    assert lines[-1] == NOTHING_LIVES
    return lines[:-1]


def steps(lines: list[str]) -> list[str]:
    """Without what the device was asked for."""
    return [line for line in lines if re.match(r"(submit|wait) ", line)]


def test_an_old_gpu_is_refused_in_one_sentence(program: Path) -> None:
    assert told(program, "capability") == [
        "create refused: A GPU has compute capability 7.5; the CUDA encoder needs 8.0 or newer"
    ]


@pytest.mark.parametrize("scenario", ["no code", "empty code"])
def test_a_build_without_code_for_the_gpu_is_refused(program: Path, scenario: str) -> None:
    (line,) = told(program, scenario)
    assert line.startswith("create refused: this build has no code for compute capability 9.0")
    assert "EMBERT_CUDA_ARCHITECTURES" in line


def test_a_build_for_90_instead_of_90a_is_refused_but_runs_the_portable_kernels(program: Path) -> None:
    own, portable = told(program, "plain 90")
    assert own.startswith(
        "create refused: this build has no code with Hopper's own instructions: it was compiled for 90,"
    )
    assert portable == "create fine"


def test_an_ampere_gpu_needs_none_of_hoppers_code(program: Path) -> None:
    assert told(program, "ampere") == ["create fine"]


def test_memory_that_runs_out_at_start_is_refused_and_all_of_it_given_back(program: Path) -> None:
    lines = told(program, "memory at start")
    assert len(lines) == 20
    assert lines[0].startswith("create refused: cudaM")
    assert {line.partition(":")[0] for line in lines} <= {"create refused", "create fine"}


@pytest.mark.parametrize(
    ("scenario", "reason"), [("graphs", "cudaGraphInstantiate"), ("a capture", "an attention that")]
)
def test_a_graph_that_cannot_be_made_leaves_none_behind(program: Path, scenario: str, reason: str) -> None:
    (line,) = told(program, scenario)
    assert line.startswith(f"start refused: {reason}")


@pytest.mark.parametrize("table", ["weights", "architectures", "int8", "fused"])
def test_each_case_of_a_table_is_refused_for_its_reason(program: Path, table: str) -> None:
    assert told(program, table) == []


def test_matrices_of_layers_are_int8_and_share_memory_for_the_widest_rows(program: Path) -> None:
    """Those of heads are not int8. test_computed_forwards.py compares what comes out of such layers."""
    lines = [line.split()[1:] for line in told(program, "int8 memory") if line.startswith("prepare ")]
    products = [{key: int(value) for key, value in (pair.split("=") for pair in line)} for line in lines]
    assert [each["scales"] == -1 for each in products] == [False] * 4 * 3 + [True]
    (sizes,) = {each["quantized_scales"] - each["quantized"] for each in products[:12]}
    assert sizes == 4096 * 1024


def test_what_is_over_a_limit_is_refused_before_anything_is_queued(program: Path) -> None:
    assert told(program, "too many tokens") == ["create refused: max_batch_tokens must be 1 to 4194240, found 4194241"]
    lines = told(program, "tiles")
    assert lines[:2] == [
        "submit refused: attention: 66000 tiles of 64 queries and 0 texts of up to 32 tokens are over 65535 in a batch",
        "submit refused: a batch of 65536 tokens in 65536 sequences; "
        "at most 4194240 tokens in 65535 sequences can be run",
    ]
    assert steps(lines[2:]) == ["submit fine", "wait fine"]


def test_memory_that_runs_out_fails_a_batch_and_no_more(program: Path) -> None:
    lines = told(program, "memory")
    assert lines[0].startswith("allocate ")
    assert lines[1] == "synchronize"  # nothing but the failed allocation was asked for
    assert [line.partition(": cudaErr")[0] for line in steps(lines)] == [
        "submit refused: cudaMallocHost(&data_, bytes): error: of the recording device",
        "submit fine", "wait fine", "submit fine", "wait fine",
    ]  # fmt: skip


def test_a_launch_that_fails_is_waited_for_before_its_memory_is_reused(program: Path) -> None:
    lines = told(program, "a launch")
    first = lines[: lines.index(steps(lines)[0])]
    assert [line.split()[0] for line in first[-3:]] == ["synchronize"] * 3
    assert [re.match(r"\w+ \w+", line)[0] for line in steps(lines)] == [  # type: ignore[index]
        "submit refused", "submit fine", "wait fine", "submit lost", "submit lost",
    ]  # fmt: skip
    assert "the encoder was lost earlier" in lines[-1]


def test_a_ticket_is_redeemed_once_and_by_its_own_encoder(program: Path) -> None:
    no = "refused: this ticket is not in flight: it was redeemed, or is not this encoder's"
    assert told(program, "tickets") == [
        f"again {no}", f"stale {no}", f"elsewhere {no}", f"never {no}",
        "third fine", "rows 1", "second fine", "rows 2", "theirs fine",
    ]  # fmt: skip


def test_dimensions_are_from_0_to_the_hidden_size(program: Path) -> None:
    assert steps(told(program, "dimensions")) == [
        "submit refused: dimensions of sequence 1 must be 0 to 256, found -1",
        "submit refused: dimensions of sequence 0 must be 0 to 256, found 257",
        "submit fine", "wait fine",
    ]  # fmt: skip


def test_prefixes_are_whole_steps_of_sequences_without_one(program: Path) -> None:
    both_ways, *lines = steps(told(program, "prefixes"))
    assert both_ways == "submit refused: sequences of this model cannot continue others"
    wrong = [(2, 8, 0), (1, 12, 0), (1, 104, 0), (1, 8, 3), (1, -8, 0), (2, 8, 1), (1, 8, -1), (0, 8, 0)]
    assert lines[:2] == ["submit fine", "wait fine"]
    for line, (sequence, tokens, owner) in zip(lines[2:], wrong, strict=True):
        assert f"sequence {sequence} cannot continue {tokens} tokens of sequence {owner}:" in line


def test_a_sequence_attends_to_one_of_its_tokens_at_least(program: Path) -> None:
    assert steps(told(program, "attended")) == [
        "submit refused: attended tokens of sequence 1 must be 1 to 30, found 0",
        "submit refused: attended tokens of sequence 0 must be 1 to 20, found 21",
        "submit fine", "wait fine",
    ]  # fmt: skip


def test_tasks_are_what_the_model_has_heads_for(program: Path) -> None:
    must = "must be bits of 7 (EMBED, TOKENS, CLASSIFY), and not 0"
    assert steps(told(program, "tasks")) == [
        f"submit refused: tasks of sequence 1 {must}, found 0",
        f"submit refused: tasks of sequence 0 {must}, found 8",
        f"submit refused: tasks of sequence 1 {must}, found 32",
        "submit fine", "wait fine",
    ]  # fmt: skip


def test_positions_of_the_host_come_after_the_devices_own(program: Path) -> None:
    lines = told(program, "positions")
    taken = [line.split()[0] for line in lines[: lines.index("submit fine")]]
    assert taken[:4] == ["copy", "offsets", "copy", "embedding"]
    assert "graph" not in taken
    no = "submit refused: a position is outside the model's table of 513"
    assert steps(lines) == ["submit fine", "wait fine", no, no, "submit fine", "wait fine"]
    assert lines[-3] == "graph"  # a batch without goes its usual way


def test_where_a_product_may_write(program: Path) -> None:
    said = dict(line.split(" fine" if line.endswith(" fine") else " refused: ") for line in told(program, "places"))
    assert [name for name, reason in said.items() if not reason] == ["apart", "in place"]
    assert said["over x"] == "a product cannot write over its own input"
    over = "a product that leaves sums cannot write over rows or sums that it reads"
    assert said["in place with sums"] == said["over sums"] == over
