"""Compares the machine code of all kernels of two source trees: for changes of csrc that must not change any.

    python -m benchmarks.kernels.machine_code BEFORE AFTER [--architecture 90a] [--folder build/machine-code]

Compiles every .cu file of both trees as CMake does. Kernels are paired by their instructions and registers, so a
renamed kernel is equal. What has no partner is printed: kernels of the same name, then kernels that only one tree has.
Needs nvcc and no GPU. Cubins stay in the folder: an interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

OPTIONS = ("-O3", "-DNDEBUG", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden")
UNNAMED = re.compile(r"\d+_GLOBAL__N__\w*?_cu_[0-9a-f]+(?:_\d+)?")  # an unnamed namespace's mangled name has its file
SYMBOL_BYTES = 24
EIFMT_SVAL, EIATTR_REGCOUNT = 0x04, 0x2F


class Body(NamedTuple):
    """The code that the GPU runs: equal for equal kernels with different names."""

    digest: str  # of the instructions
    size: int  # bytes of instructions
    registers: int


Kernel = tuple[str, Body]  # mangled name, without unnamed namespaces


def main(argv: Sequence[str] | None = None) -> None:
    """Compile, compare, print what differs; exit with 1 if anything does."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.machine_code")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--architecture", default="90a")
    parser.add_argument("--folder", type=Path, default=Path("build/machine-code"))
    options = parser.parse_args(argv)
    before, after = (
        kernels(compile_tree(tree, options.architecture, options.folder / options.architecture / name))
        for name, tree in (("before", options.before), ("after", options.after))
    )
    equal, only_before, only_after = compare(before, after)
    for name in sorted({name for name, _ in (*only_before, *only_after)}):
        print(f"{sizes(only_before, name)} before, {sizes(only_after, name)} after: {name}")
    print(
        f"sm_{options.architecture}: {len(before)} kernels before, {len(after)} after; {equal} are equal, "
        f"{len(only_before)} before and {len(only_after)} after are not"
    )
    raise SystemExit(bool(only_before or only_after))


def compile_tree(tree: Path, architecture: str, folder: Path) -> list[Path]:
    """The cubins of a tree's sources that define or instantiate kernels."""
    folder.mkdir(parents=True, exist_ok=True)
    cubins = []
    for source in sorted((tree / "csrc").rglob("*.cu")):
        cubin = folder / "-".join(source.relative_to(tree / "csrc").with_suffix(".cubin").parts)
        cubins.append(cubin)
        if not cubin.exists():
            print(source, flush=True)
            partial = cubin.with_suffix(".partial")
            target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
            command = ["nvcc", *OPTIONS, target, f"-I{tree / 'csrc'}", "-cubin", "-o", str(partial), str(source)]
            subprocess.run(command, check=True)
            partial.rename(cubin)
    return cubins


def compare(before: Sequence[Kernel], after: Sequence[Kernel]) -> tuple[int, list[Kernel], list[Kernel]]:
    """The number of kernels with the same body in both trees, and the others of each tree."""
    equal = Counter(body for _, body in before) & Counter(body for _, body in after)
    return equal.total(), _left(before, after, equal), _left(after, before, equal)


def _left(kernels: Sequence[Kernel], others: Sequence[Kernel], equal: Counter[Body]) -> list[Kernel]:
    """Kernels without a partner; of kernels with equal bodies those whose names the other tree has are paired first."""
    unpaired, names, left = equal.copy(), set(others), []
    for kernel in sorted(kernels, key=lambda kernel: kernel not in names):
        if unpaired[kernel[1]]:
            unpaired[kernel[1]] -= 1
        else:
            left.append(kernel)
    return sorted(left)


def kernels(cubins: Sequence[Path]) -> list[Kernel]:
    """Every kernel of the cubins."""
    return [(UNNAMED.sub("", name), body) for cubin in cubins for name, body in _text_sections(cubin.read_bytes())]


def _text_sections(elf: bytes) -> Iterator[Kernel]:
    """Each kernel's section of instructions, and its registers: an attribute in .nv.info that names its symbol."""
    (headers,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, name_section = struct.unpack_from("<HHH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, headers + i * size) for i in range(count)]
    names = elf[sections[name_section][4] :]
    by_name = {
        names[offset : names.index(b"\0", offset)].decode(): index for index, (offset, *_) in enumerate(sections)
    }
    symbols = sections[by_name[".symtab"]][4]
    registers = {}
    for symbol, value in _register_counts(_content(elf, sections[by_name[".nv.info"]])):
        (section,) = struct.unpack_from("<H", elf, symbols + SYMBOL_BYTES * symbol + 6)
        registers[section] = value
    for name, index in by_name.items():
        if name.startswith(".text."):
            code = _content(elf, sections[index])
            yield name.removeprefix(".text."), Body(hashlib.sha256(code).hexdigest(), len(code), registers[index])


def _content(elf: bytes, section: tuple[int, ...]) -> bytes:
    return elf[section[4] : section[4] + section[5]]


def _register_counts(info: bytes) -> Iterator[tuple[int, int]]:
    """Symbols and their registers, from the attributes of .nv.info: format, attribute, size or value, content."""
    offset = 0
    while offset < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, offset)
        if attribute == EIATTR_REGCOUNT:
            yield struct.unpack_from("<II", info, offset + 4)
        offset += 4 + (value if form == EIFMT_SVAL else 0)


def sizes(kernels: Sequence[Kernel], name: str) -> str:
    """Bytes and registers of the kernels of this name, to see how much differs."""
    return (
        ", ".join(f"{body.size} B in {body.registers} registers" for other, body in kernels if other == name) or "none"
    )


if __name__ == "__main__":
    main()
