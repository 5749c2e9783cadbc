"""Copies the installed ONNX Runtime into a folder, in which it finds no AVX-512: for comparisons of AVX2 kernels.

    python -m benchmarks.rivals.onnxruntime_avx2 /tmp/avx2
    PYTHONPATH=/tmp/avx2 EMBERT_CPU_ISA=AVX2 python -m benchmarks.encoder.cpu.int8

ONNX Runtime has no option for this. It uses AVX-512 only if `xgetbv` says that the system saves its registers (bits 5
to 7), so each `xgetbv` of the copy becomes instructions of the same length that return the bits of AVX2 alone. Needs
objdump.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

XGETBV = bytes.fromhex("0f01d0")
ONLY_AVX2 = bytes.fromhex("6a0758")  # push 7; pop rax


def main(folder: Path) -> None:
    import onnxruntime

    copy = folder / "onnxruntime"
    shutil.copytree(Path(onnxruntime.__file__).parent, copy, dirs_exist_ok=True)
    (library,) = copy.glob("capi/onnxruntime_pybind11_state*.so")
    code = subprocess.run(["objdump", "-d", library], stdout=subprocess.PIPE, text=True, check=True).stdout
    addresses = [int(found, 16) for found in re.findall(r"^ *([0-9a-f]+):[^\n]*\bxgetbv *$", code, re.MULTILINE)]
    headers = subprocess.run(["objdump", "-h", library], stdout=subprocess.PIPE, text=True, check=True).stdout
    size, start, offset = (int(found, 16) for found in re.findall(r" \.text +(\w+) +(\w+) +\w+ +(\w+)", headers)[0])
    content = bytearray(library.read_bytes())
    for address in addresses:
        place = address - start + offset
        if not start <= address < start + size or content[place : place + 3] != XGETBV:
            raise SystemExit(f"{library.name}: xgetbv at {address:#x} is not where it is expected")
        content[place : place + 3] = ONLY_AVX2
    library.write_bytes(content)
    print(f"{library}: replaced {len(addresses)} xgetbv")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
