"""Device memory for kernel tests: every array is followed by guard bytes, every output starts as NaN."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.csrc.reference import FLOAT16, FLOAT32

GUARD = 4096  # bytes after each array, all ones (NaN in every float type)
STORAGE: dict[int, type[np.generic]] = {FLOAT32: np.float32, FLOAT16: np.float16}


def numpy_type(dtype: int) -> type[np.generic]:
    return STORAGE.get(dtype, np.uint16)


class Device:
    """One stream, the launchers, and arrays by address."""

    def __init__(self) -> None:
        self.launch: Any = importlib.import_module("embert.engine._cuda_testing").Bench()
        self._arrays: dict[int, int] = {}

    def put(self, array: npt.NDArray[Any]) -> int:
        """Copy an array to the device."""
        data = np.ascontiguousarray(array)
        address = self.new(data.nbytes)
        if data.nbytes:
            self.launch.upload(address, data.reshape(-1).view(np.uint8))
        return address

    def new(self, nbytes: int) -> int:
        """Room for an output, NaN all over."""
        address = int(self.launch.allocate(nbytes + GUARD))
        self.launch.fill(address, 0xFF, nbytes + GUARD)
        self._arrays[address] = nbytes
        return address

    def get(self, address: int, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
        """Copy an array back, and check every guard."""
        out = np.empty(shape, dtype)
        if out.nbytes:
            self.launch.download(out.reshape(-1).view(np.uint8), address)
        self.check_guards()
        return out

    def check_guards(self) -> None:
        for address, nbytes in self._arrays.items():
            guard = np.empty(GUARD, np.uint8)
            self.launch.download(guard, address + nbytes)
            assert (guard == 0xFF).all(), "a kernel wrote past the end of an array"

    def free(self) -> None:
        self.launch.synchronize()
        for address in self._arrays:
            self.launch.free(address)
        self._arrays.clear()
