"""Whether a checkpoint's weights fit float16, whose numbers end at 65 504 and lose digits below 6e-5.

Checkpoints in bfloat16 or float32 may hold numbers that float16 cannot. A weight below 2⁻¹⁷ is stored with an error of
up to 2⁻²⁵. That is nothing beside weights of a usual size, but ruins a matrix that has no others. So the test looks at
a matrix as a whole, not at single small numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from embert.engine.errors import BrokenModel
from embert.engine.files.safetensors_file import Tensor
from embert.engine.weights.checkpoint import Checkpoint

__all__ = ["misfit", "unfit_for_float16"]

LARGEST = 65504.0
# The smallest step of float16 is 2⁻²⁴, so rounding errors there are 2⁻²⁴/√12 on average. Below this root mean square
# that is over three times the relative error that float16 makes in a usual matrix, 2.1e-4.
LEAST_RMS = 2.0**-15
SAMPLE = 1 << 18  # evenly spaced elements that a tensor's root mean square is taken from


def unfit_for_float16(checkpoint: Checkpoint, names: Iterable[str]) -> str | None:
    """Which matrix does not fit float16, and why, in half a sentence; None if all fit.

    Raises BrokenModel naming a tensor that has a NaN or an infinity.
    """
    for name in names:
        reason = misfit(checkpoint.stored(name), f"{checkpoint.path}: {name}")
        if reason is not None:
            return f"{name} {reason}"
    return None


def misfit(tensor: Tensor, called: str) -> str | None:
    """Why a matrix does not fit float16, as the rest of a sentence about it; None if it fits.

    Raises BrokenModel by what the matrix is `called`, if it has a NaN or an infinity.
    """
    largest = _largest(tensor)
    if not np.isfinite(largest):
        raise BrokenModel(f"{called} has elements that are not finite")
    if tensor.dtype == "F16":
        return None
    if largest > LARGEST:
        return f"has an element of {largest:.4g}, and float16 ends at {LARGEST:.0f}"
    rms = _root_mean_square(tensor)
    if 0 < rms < LEAST_RMS:
        return f"has elements of {rms:.2g} on average, too small for float16"
    return None


def _largest(tensor: Tensor) -> float:
    """The largest absolute value; NaN if there is one."""
    array = tensor.array
    if array.size == 0:
        return 0.0
    if tensor.dtype == "BF16":  # without the sign, its bits sort as its numbers do
        bits = np.uint16((array & np.uint16(0x7FFF)).max())
        return float((bits.astype(np.uint32) << 16).view(np.float32))
    return float(max(array.max(), -array.min()))


def _root_mean_square(tensor: Tensor) -> float:
    flat: npt.NDArray[np.generic] = tensor.array.reshape(-1)
    some = Tensor(flat[:: max(1, flat.size // SAMPLE)], tensor.dtype).float32().astype(np.float64)
    return float(np.sqrt(np.mean(np.square(some)))) if some.size else 0.0
