"""Which kernels of two source trees have different machine code: for changes of csrc that should change none.

    python -m tests.csrc.machine_code BEFORE AFTER [--architecture 90a] [--folder build/machine-code]

Compiles every .cu file of both trees as CMake does, and compares the instructions of all kernels by name, and their
registers. Needs nvcc, no GPU. What is compiled stays in the folder: an interrupted run goes on where it ended.
"""

from __future__ import annotations

import argparse
import re
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

OPTIONS = ("-O3", "-DNDEBUG", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden")
UNNAMED = re.compile(r"\d+_GLOBAL__N__\w*?_cu_[0-9a-f]+(?:_\d+)?")  # an unnamed namespace, which names its file
NO_BYTES = 8  # SHT_NOBITS

Code = tuple[bytes, int]  # instructions, registers


def main(argv: Sequence[str] | None = None) -> None:
    """Compile, compare, name what differs."""
    parser = argparse.ArgumentParser(prog="tests.csrc.machine_code")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--architecture", default="90a")
    parser.add_argument("--folder", type=Path, default=Path("build/machine-code"))
    options = parser.parse_args(argv)
    before, after = (
        kernels(compiled(tree, options.config, options.folder / options.config / name))
        for name, tree in (("before", options.before), ("after", options.after))
    )
    different = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    for name in different:
        print(f"differs: {name} {sizes(before.get(name, []))} {sizes(after.get(name, []))}")
    print(f"sm_{options.config}: {len(before)} kernels before, {len(after)} after, {len(different)} differ")
    raise SystemExit(bool(different))


def compiled(tree: Path, config: str, folder: Path) -> list[Path]:
    """The cubins of a tree's sources."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for source in sorted((tree / "csrc").rglob("*.cu")):
        cubin = folder / f"{source.stem}.cubin"
        made.append(cubin)
        if not cubin.exists():
            print(f"{source}", flush=True)
            part = cubin.with_suffix(".part")
            machine = f"-gencode=arch=compute_{config},code=sm_{config}"
            command = ["nvcc", *OPTIONS, machine, f"-I{tree / 'csrc'}", "-cubin", "-o", str(part), str(source)]
            subprocess.run(command, check=True)
            part.rename(cubin)
    return made


def kernels(cubins: Sequence[Path]) -> dict[str, list[Code]]:
    """By mangled name, without what an unnamed namespace adds: so several may have the same."""
    found: dict[str, list[Code]] = {}
    for cubin in cubins:
        for name, code in texts(cubin.read_bytes()):
            found.setdefault(UNNAMED.sub("", name), []).append(code)
    return {name: sorted(codes) for name, codes in found.items()}


def texts(elf: bytes) -> Iterator[tuple[str, Code]]:
    """Each kernel's section of instructions; its registers are the highest byte of the section's info."""
    (headers,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, headers + i * size) for i in range(count)]
    names = elf[sections[names_at][4] :]
    for name_at, kind, _, _, offset, length, _, info, _, _ in sections:
        name = names[name_at : names.index(b"\0", name_at)].decode()
        if name.startswith(".text.") and kind != NO_BYTES:
            yield name.removeprefix(".text."), (elf[offset : offset + length], info >> 24)


def sizes(codes: Sequence[Code]) -> str:
    """Bytes and registers, to see at a glance how much differs."""
    return ", ".join(f"{len(code)} B in {registers} registers" for code, registers in codes) or "none"


if __name__ == "__main__":
    main()
