"""The embedding head after pooling, in numpy: Dense modules, the Matryoshka cut, L2 normalisation.

Encoders that fuse the cut and the normalisation into their own work call it only where there are Dense modules.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from embert.engine.heads.dense import Dense
from embert.engine.heads.dense_layer import load_dense

__all__ = ["EmbeddingHead"]

Floats = npt.NDArray[np.float32]


class EmbeddingHead:
    """Pooled rows to embeddings."""

    def __init__(self, folder: Path, dense: tuple[Dense, ...]) -> None:
        """Load the weights of the Dense modules of the model in `folder`. Raises BrokenModel."""
        self._dense = load_dense(folder, dense)

    def __call__(
        self,
        pooled: Floats,
        dimensions: npt.NDArray[np.int32] | None = None,
        normalize: npt.NDArray[np.bool_] | None = None,
    ) -> Floats:
        """float32 [B, hidden] → float32 [B, width]. May change `pooled`.

        `dimensions` [B] keeps the first dimensions[i] columns of row i (0: all) and zeroes the rest. `normalize` [B]
        says which rows are then divided by their L2 norm; None means all. A row of zeros stays zeros.
        """
        vectors = pooled
        for layer in self._dense:
            vectors = layer(vectors)
        if dimensions is not None and dimensions.any():
            kept = np.where(dimensions == 0, vectors.shape[1], dimensions)
            vectors[np.arange(vectors.shape[1]) >= kept[:, None]] = 0
        if normalize is None or normalize.any():
            norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))
            # sentence-transformers, too, divides by max(norm, 1e-12).
            scale = np.float32(1) / np.maximum(norms, np.float32(1e-12))
            if normalize is not None:
                scale[~normalize] = 1
            vectors *= scale[:, None]
        return vectors
