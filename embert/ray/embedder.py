"""A stage of Ray Data: each actor has one engine, and adds a column to Arrow tables."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Unpack

import pyarrow as pa

from embert.engine import Engine
from embert.engine.errors import EncoderLost, EngineError
from embert.ray.columns import class_scores, multi_vectors, sparse_vectors, texts, vectors
from embert.ray.errors import ColumnError, EmbedderError
from embert.ray.gpus import assigned_device, assigned_gpus

log = logging.getLogger(__name__)

TaskName = Literal["embed", "sparse", "multi", "score", "classify"]
_SOFTWARE_FAULT = 70  # an exit status, EX_SOFTWARE


class LoadOptions(TypedDict, total=False):
    """Options of `Engine.load`."""

    device: str
    dtype: str
    revision: str | None
    pooling: str | None
    max_batch_tokens: int | None
    encoder: str
    min_agreement: float


class Options(LoadOptions, total=False):
    """Options of `Engine.load` and of the engine's methods, with their meanings and defaults."""

    prompt_name: str | None
    truncate: bool
    adapter: str | None  # the engine's `task`
    normalize: bool
    dimensions: int | None
    is_query: bool
    raw: bool
    instruction: str | None


class Embedder:
    """Stage for `Dataset.map_batches(Embedder, batch_format="pyarrow", …)`: adds a column to the rows of a batch.

    task      `column` names    takes also                        the new column holds
    embed     texts             adapter, normalize, dimensions    FixedSizeList<float32>[width, or `dimensions`]
    sparse    texts             adapter                           struct<indices: list<int32>, values: list<float32>>
    multi     texts             adapter, is_query                 list<FixedSizeList<float32>[columns]>
    score     both of a pair    raw                               float32
    classify  texts, or both    raw                               list<struct<label: string, score: float32>>

    All but classify take `instruction`, too.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        column: str | Sequence[str] = "text",
        output_column: str | None = None,
        task: TaskName = "embed",
        **options: Unpack[Options],
    ) -> None:
        """Load the model, once for each actor.

        `column` is one name, or two for pairs of texts. `output_column` is by default `embedding`, `sparse`,
        `vectors`, `score` or `classes`. The engine runs on the GPU that Ray gives the actor (`num_gpus=1`), and on
        the CPU if it gives none, unless `device` says otherwise.

        Raises EmbedderError for a model that cannot be loaded or does not have the task, and for options that are
        unknown or of another task.
        """
        if task not in _KINDS:
            raise EmbedderError(f"`task` must be one of {', '.join(_KINDS)}; it is {task!r}")
        self._kind = _KINDS[task]
        self._columns = (column,) if isinstance(column, str) else tuple(column)
        if len(self._columns) not in self._kind.columns:
            counts = " or ".join(map(str, self._kind.columns))
            raise EmbedderError(f"the task {task} reads {counts} columns; `column` names {', '.join(self._columns)}")
        self._output_column = output_column or self._kind.output_column
        loading: dict[str, Any] = {
            name: value for name, value in options.items() if name in LoadOptions.__annotations__
        }
        self._options = {name: value for name, value in options.items() if name not in loading}
        for name in self._options:
            if name not in (allowed := ("prompt_name", "truncate", *self._kind.options)):
                known = ", ".join((*LoadOptions.__annotations__, *allowed))
                raise EmbedderError(f"`{name}` is not an option of the task {task}; its options are {known}")
        if "adapter" in self._options:
            self._options["task"] = self._options.pop("adapter")
        if (gpus := assigned_gpus() or 0) > 1:
            raise EmbedderError(f"an engine runs on one GPU, and Ray has given this actor {gpus}: num_gpus=1")
        loading["device"] = assigned_device(options.get("device", "auto"))
        try:
            self._engine = Engine.load(model, **loading)
            self._kind.run(self._engine, [], self._options)  # fails now rather than at the first batch
        except EngineError as error:
            raise EmbedderError(str(error)) from None

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Returns the rows of `batch`, in their order, with the new column as the last.

        Raises ColumnError for a column that is missing, exists already, has a null, or is not of strings; EmbedderError
        for inputs that the engine refuses, such as a text that is too long while `truncate` is false. If the engine is
        lost, perhaps with its GPU, the process exits, and Ray starts another actor for the batch.
        """
        if not isinstance(batch, pa.Table):
            kind = type(batch).__name__
            raise EmbedderError(f'Embedder takes Arrow tables, not {kind}: map_batches(…, batch_format="pyarrow")')
        if self._output_column in batch.column_names:
            raise ColumnError(f"there is a column {self._output_column!r} already; choose another `output_column`")
        columns = [texts(batch, name) for name in self._columns]
        inputs = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
        try:
            return batch.append_column(self._output_column, self._kind.run(self._engine, inputs, self._options))
        except EncoderLost as error:
            log.critical("%s; this actor ends, so that another takes its place", error)
            logging.shutdown()
            os._exit(_SOFTWARE_FAULT)  # an exception would end the whole dataset
        except EngineError as error:
            raise EmbedderError(str(error)) from None


@dataclass(frozen=True, slots=True)
class _Kind:
    """A task of the stage."""

    output_column: str
    options: tuple[str, ...]  # in addition to those of all tasks
    columns: tuple[int, ...]  # allowed numbers of columns to read
    run: Callable[[Engine, Sequence[Any], Mapping[str, Any]], pa.Array]


def _multi(engine: Engine, inputs: Sequence[str], options: Mapping[str, Any]) -> pa.Array:
    token_vectors = engine.embed_multi(inputs, **options)
    head = engine.model.heads.multi_vector
    assert head is not None  # noqa: S101 - embed_multi would have raised
    return multi_vectors(token_vectors, head.columns)


_KINDS = {
    "embed": _Kind(
        "embedding",
        ("adapter", "normalize", "dimensions", "instruction"),
        (1,),
        lambda engine, inputs, options: vectors(engine.embed(inputs, **options)),
    ),
    "sparse": _Kind(
        "sparse",
        ("adapter", "instruction"),
        (1,),
        lambda engine, inputs, options: sparse_vectors(engine.embed_sparse(inputs, **options)),
    ),
    "multi": _Kind("vectors", ("adapter", "is_query", "instruction"), (1,), _multi),
    "score": _Kind(
        "score",
        ("raw", "instruction"),
        (2,),
        lambda engine, inputs, options: pa.array(engine.score(inputs, **options)),
    ),
    "classify": _Kind(
        "classes",
        ("raw",),
        (1, 2),
        lambda engine, inputs, options: class_scores(engine.classify(inputs, **options)),
    ),
}
