"""The encoder's host side before recording_device.cpp, which stands in for CUDA and writes down what it is asked."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.csrc.host_program import RECORDED, build

CLS, MEAN, MAX, LAST = range(4)
LAYERS, HIDDEN = 3, 256
HOPPER = "hopper"
BERT, STORED_IN_FLOAT16 = 0, 0  # recorded_forwards.cpp takes other kinds of models and checkpoints, too
EMBED, TOKENS, CLASSIFY, SPARSE, MULTI = (1 << bit for bit in range(5))
LONG = [500, 400, 300, 20, 33]

Launch = tuple[str, dict[str, int]]
Batch = Sequence[int | tuple[int, int]]  # lengths, or lengths and bits of tasks; without, EMBED


def built(folder: Path) -> Path:
    """The program that the functions below run."""
    return build(folder, Path(__file__).with_name("recorded_forwards.cpp"), *RECORDED)


def launches(program: Path, pooling: int, gemm: str, *batches: Batch, **options: int) -> list[Launch]:
    """The calls of one encoder after its start, from "started" on."""
    found = everything(program, pooling, gemm, *batches, **options)
    return found[names(found).index("started") :]


def everything(
    program: Path, pooling: int, gemm: str, *batches: Batch, graphs: int = 0, heads: int = 0
) -> list[Launch]:
    """The same from the moment that the weights are there. `heads`: bits of tasks; EMBED: Dense modules."""

    def written(text: int | tuple[int, int]) -> str:
        return str(text) if isinstance(text, int) else f"{text[0]}:{text[1]}"

    lengths = " / ".join(" ".join(map(written, batch)) for batch in batches).split()
    options = [str(int(option)) for option in (graphs, BERT, STORED_IN_FLOAT16, heads)]
    command = [str(program), str(pooling), gemm, *options, *lengths]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = []
    for line in told.splitlines():
        name, _, rest = line.partition(" ")
        assert name != "refused", line
        found.append((name, {key: int(value) for key, _, value in (pair.partition("=") for pair in rest.split())}))
    return found


def names(found: list[Launch]) -> list[str]:
    return [name for name, _ in found]


def only(found: list[Launch], name: str) -> list[dict[str, int]]:
    return [values for each, values in found if each == name]
