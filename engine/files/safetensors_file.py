"""Reads a safetensors file: a length, a JSON header (safetensors_header.py), then raw tensors.

The `safetensors` package does not fit: its numpy side has no bfloat16, and its torch side would bring torch into the
CUDA engine. Tensors are views of the mapped file. Nothing is copied before it is converted, and processes that serve
the same model share the pages.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embert.engine.errors import BrokenModel
from embert.engine.files.safetensors_header import broken, parse_header

# numpy has no bfloat16: its bits come as uint16, and the dtype tag tells them apart from integers.
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"), "I32": np.dtype("<i4"), "I16": np.dtype("<i2"), "I8": np.dtype("i1"), "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Tensor:
    """Tensor as it is stored."""

    array: npt.NDArray[Any]  # a view of the mapped file; uint16 for bfloat16
    dtype: str  # the format's tag: "F32", "F16", "BF16", …

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def check(self, path: Path, name: str, shape: tuple[int, ...]) -> None:
        """Raise BrokenModel, naming the file and the tensor, for another shape or a dtype that is not a float."""
        if self.shape != shape:
            raise BrokenModel(f"{path}: {name} has shape {list(self.shape)}, config.json implies {list(shape)}")
        if self.dtype not in FLOATS:
            raise BrokenModel(f"{path}: {name} has dtype {self.dtype}, expected one of {', '.join(FLOATS)}")

    def float32(self) -> npt.NDArray[np.float32]:
        """The values in float32: the mapped view itself where they are stored so, else a copy."""
        if self.dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            return (self.array.astype(np.uint32) << 16).view(np.float32)
        return self.array.astype(np.float32, copy=False)


class SafetensorsFile:
    """The tensors of one file, by name."""

    def __init__(self, path: Path) -> None:
        """Map the file and check its header against its size. Raises BrokenModel naming the file and the reason."""
        self.path = path
        try:
            with path.open("rb") as file:
                # A private, copy-on-write mapping, because torch warns about read-only memory. Nothing writes to it, so
                # all pages stay shared.
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise BrokenModel(f"{path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:  # mmap of an empty file
            raise broken(path, "the file is empty") from error
        self._header, self._data = parse_header(path, self._bytes, len(self._bytes))

    def __contains__(self, name: str) -> bool:
        return name in self._header

    @property
    def names(self) -> list[str]:
        return list(self._header)

    def release(self) -> None:
        """Unmap the pages that have been read. Who reads them again gets them from the file, or the page cache."""
        self._bytes.madvise(mmap.MADV_DONTNEED)

    def tensor(self, name: str) -> Tensor:
        """A tensor of the file. Raises KeyError if there is none of this name."""
        entry = self._header[name]
        dtype = DTYPES[entry["dtype"]]
        start, stop = entry["data_offsets"]
        flat = np.frombuffer(self._bytes, dtype, (stop - start) // dtype.itemsize, self._data + start)
        return Tensor(flat.reshape(entry["shape"]), entry["dtype"])
