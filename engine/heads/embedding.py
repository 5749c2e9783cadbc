"""The embedding head after pooling, in numpy: the modules after it, the Matryoshka cut, L2 normalization.

Encoders that fuse the cut and the normalization into their own work call it only where there are modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from embert.engine.heads.dense import Module
from embert.engine.heads.dense_layer import load_modules

__all__ = ["EmbeddingHead"]

Floats = npt.NDArray[np.float32]


class EmbeddingHead:
    """Pooled rows to embeddings."""

    def __init__(self, folder: Path, modules: Sequence[Module], *, rows: int = 0) -> None:
        """Load the weights of the modules after pooling of the model in `folder`. Raises BrokenModel.

        `rows` is the number of rows multiplied at once, padded with rows of zeros: products of other shapes may add
        their terms in another order, and results are batch-invariant. 0: all at once.
        """
        self._modules = load_modules(folder, modules)
        self._rows = rows

    def __call__(
        self,
        pooled: Floats,
        dimensions: npt.NDArray[np.int32] | None = None,
        normalize: npt.NDArray[np.bool_] | None = None,
    ) -> Floats:
        """float32 [B, pooled columns] → float32 [B, width]. May change `pooled`.

        `dimensions` [B] keeps the first dimensions[i] columns of row i (0: all) and zeroes the rest. `normalize` [B]
        says which rows are then divided by their L2 norm; None means all. A row of zeros stays zeros.
        """
        vectors = self._through(pooled) if self._modules else pooled
        if dimensions is not None and dimensions.any():
            widths = np.where(dimensions == 0, vectors.shape[1], dimensions)
            vectors[np.arange(vectors.shape[1]) >= widths[:, None]] = 0
        if normalize is None or normalize.any():
            norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
            # sentence-transformers, too, divides by max(norm, 1e-12).
            scale = np.float32(1) / np.maximum(norms, np.float32(1e-12))
            if normalize is not None:
                scale[~normalize] = 1
            vectors *= scale[:, None]
        return vectors

    def _through(self, pooled: Floats) -> Floats:
        if not self._rows:
            return self._block(pooled)
        padded = np.zeros((max(1, -(-len(pooled) // self._rows)) * self._rows, pooled.shape[1]), np.float32)
        padded[: len(pooled)] = pooled
        blocks = [self._block(padded[first : first + self._rows]) for first in range(0, len(padded), self._rows)]
        return np.concatenate(blocks)[: len(pooled)]

    def _block(self, x: Floats) -> Floats:
        for module in self._modules:
            x = module(x)
        return x
