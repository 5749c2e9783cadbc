"""Converts Arrow columns to texts, and an engine's results to Arrow columns. Does not depend on Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from embert.engine import LabelScore, SparseVector
from embert.ray.errors import ColumnError

Floats = npt.NDArray[np.float32]


def texts(table: pa.Table, column: str) -> list[str]:
    """Returns the texts of a column, whose type is one of Arrow's strings, plain or as a dictionary.

    Raises ColumnError, which names the column, and the row of the first null.
    """
    if column not in table.column_names:
        raise ColumnError(f"there is no column {column!r}; the columns are {', '.join(map(repr, table.column_names))}")
    if table.column_names.count(column) > 1:
        raise ColumnError(f"several columns have the name {column!r}; rename all but one of them")
    values = table.column(column)
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise ColumnError(f"column {column!r} holds {values.type}, not strings; cast it first")
    strings: list[str] = values.to_pylist()
    if values.null_count:
        row = strings.index(None)  # type: ignore[arg-type]  # Arrow's null
        raise ColumnError(
            f"column {column!r} is null in row {row} of a batch of {len(strings)}; filter or fill such rows first"
        )
    return strings


def vectors(rows: Floats) -> pa.Array:
    """Converts float32 [n, width] to FixedSizeList<float32>[width], without copying the numbers."""
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(rows).reshape(-1)), rows.shape[1])


def sparse_vectors(rows: Sequence[SparseVector]) -> pa.Array:
    """Returns struct<indices: list<int32>, values: list<float32>>, two lists of the same length in each row."""
    offsets = _offsets([len(row.indices) for row in rows])
    indices = np.concatenate([row.indices for row in rows]) if rows else np.empty(0, np.int32)
    values = np.concatenate([row.values for row in rows]) if rows else np.empty(0, np.float32)
    lists = [
        pa.ListArray.from_arrays(offsets, pa.array(numbers, kind))
        for numbers, kind in ((indices, pa.int32()), (values, pa.float32()))
    ]
    return pa.StructArray.from_arrays(lists, names=["indices", "values"])


def multi_vectors(rows: Sequence[Floats], columns: int) -> pa.Array:
    """Returns list<FixedSizeList<float32>[columns]>, a vector for each token that has one."""
    numbers = np.concatenate(rows) if rows else np.empty((0, columns), np.float32)
    return pa.ListArray.from_arrays(_offsets([len(row) for row in rows]), vectors(numbers))


def class_scores(rows: Sequence[Sequence[LabelScore]]) -> pa.Array:
    """Returns list<struct<label: string, score: float32>>, best first."""
    kind = pa.list_(pa.struct([("label", pa.string()), ("score", pa.float32())]))
    return pa.array([[{"label": label.label, "score": label.score} for label in row] for row in rows], kind)


def _offsets(counts: Sequence[int]) -> pa.Array:
    """Returns the offsets of consecutive lists of these lengths."""
    ends: Any = np.cumsum(counts, dtype=np.int64)
    return pa.array(np.concatenate([[0], ends]), pa.int32())  # raises if the last one exceeds int32
