"""Text processes write blocks: in the order of the input, whoever is first, and under the lock of their run."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from embert.engine import load_model
from embert.server.bulk.child import Child, Ready, Start
from embert.server.bulk.job import BulkError, Job
from embert.server.bulk.output.containers import ArrayFile
from embert.server.bulk.output.durable import PIECE_BYTES
from embert.server.bulk.output.place import Place, write_rows
from embert.server.bulk.output.single_file import SingleFile
from embert.server.bulk.slots import Block, Slots
from tests.server.bulk.running import embed

ROWS, COLUMNS = 3, 4


@pytest.mark.parametrize("columns", [7, 5_000, PIECE_BYTES // 4 + 1], ids=["one piece", "several", "a row a piece"])
def test_rows_are_written_in_their_order(tmp_path: Path, columns: int) -> None:
    values = np.random.default_rng(0).standard_normal((50, columns), np.float32)
    numbers = np.random.default_rng(1).permutation(50)
    path = tmp_path / "rows"
    with path.open("wb") as file:
        write_rows(Place(file.fileno(), 12, path), values, numbers)
    content = path.read_bytes()
    assert content[:12] == bytes(12)
    assert content[12:] == values[numbers].tobytes()


@pytest.mark.parametrize("name", ["vectors.npy", "vectors.jsonl"])
def test_many_text_processes_write_what_one_writes(tmp_path: Path, name: str) -> None:
    """Blocks are written side by side, and the texts of a block are encoded in another order."""
    texts = tmp_path / "texts"
    lines = [f"{number} " + "word " * (number * 7 % 13) for number in range(20_000)]  # 5 blocks
    texts.write_text("".join(f"{line}\n" for line in lines))
    one, many = tmp_path / f"one-{name}", tmp_path / f"many-{name}"
    embed("--dimensions", "16", "-f", texts, "-o", one, "--tokenization-workers", "1")
    embed("--dimensions", "16", "-f", texts, "-o", many, "--tokenization-workers", "4")
    assert many.read_bytes() == one.read_bytes()
    if name == "vectors.npy":
        some = tmp_path / "some.npy"  # of blocks that are cut elsewhere
        (tmp_path / "some").write_text("".join(f"{line}\n" for line in lines[1_000:1_100]))
        embed("--dimensions", "16", "-f", tmp_path / "some", "-o", some)
        assert np.array_equal(np.load(one)[1_000:1_100], np.load(some))


def test_a_text_process_holds_the_lock_of_its_run_until_it_has_written(tmp_path: Path) -> None:
    """So a run that is killed cannot write into the file of the next one."""
    path = str(tmp_path / "vectors.npy")
    slots = Slots.create(1)
    output = SingleFile(path)
    output.begin({}, lambda: ArrayFile(COLUMNS), resume=False)
    block = Block(0, ROWS, texts=ROWS, slot=0)
    values = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    slots.put(block, "values", values)
    slots.put(block, "numbers", np.array([2, 0, 1]))
    place = output.place(block, slots)
    assert place is not None
    child = Child(
        "text process 0", Start("text", Job(output_format="npy"), load_model(), slots.descriptors, sys.path), {}
    )
    try:
        assert child.receive() == Ready()
        os.kill(child.pid, signal.SIGSTOP)
        child.send_write(block, place)
        os.close(place.descriptor)  # as if its own process was killed
        with pytest.raises(BulkError, match="another run is writing"):
            SingleFile(path)
        os.kill(child.pid, signal.SIGCONT)
        assert child.receive() == block
        with SingleFile(path):
            content = Path(f"{path}.partial").read_bytes()
            assert content[place.position :] == values[[2, 0, 1]].tobytes()
    finally:
        child.kill()
        child.wait()
        slots.close()
