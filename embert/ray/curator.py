"""A stage of NeMo Curator: embeds the documents of a pipeline, on whichever executor runs it. Needs `nemo-curator` too.

Not exported by embert.ray, so that embert.ray works without Curator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from nemo_curator.backends.base import WorkerMetadata
from nemo_curator.stages.base import ProcessingStage
from nemo_curator.stages.resources import Resources
from nemo_curator.tasks import DocumentBatch

from embert.ray.embedder import Embedder, Options, TaskName

__all__ = ["EmbedderStage"]


class EmbedderStage(ProcessingStage[DocumentBatch, DocumentBatch]):  # type: ignore[misc]  # Curator has no types
    """Adds a column to each batch of documents, as `embert.ray.Embedder` does; one engine for each worker."""

    name = "embert"

    def __init__(
        self,
        model: str | None = None,
        *,
        column: str | Sequence[str] = "text",
        output_column: str = "embeddings",
        task: TaskName = "embed",
        num_cpus: float = 1,
        num_gpus: float = 1,
        **options: Unpack[Options],
    ) -> None:
        """`output_column` is by default what Curator's semantic deduplication reads; the rest is the Embedder's.

        A worker has `num_gpus` (1 or a part of one; 0 for the CPU) and `num_cpus`.
        """
        self._model, self._columns, self._output_column, self._task = model, column, output_column, task
        # Not every executor tells Ray of its GPUs, so what Ray has given a worker does not decide.
        self._options: Options = {"device": "cuda" if num_gpus else "cpu", **options}
        self.resources = Resources(cpus=num_cpus, gpus=num_gpus)
        self._embedder: Embedder | None = None

    def inputs(self) -> tuple[list[str], list[str]]:
        """Curator's: the attributes of a batch and the columns that must be there."""
        return ["data"], [self._columns] if isinstance(self._columns, str) else list(self._columns)

    def outputs(self) -> tuple[list[str], list[str]]:
        """Curator's: the attributes of a batch and the columns that are made."""
        return ["data"], [self._output_column]

    def setup(self, worker_metadata: WorkerMetadata | None = None) -> None:  # noqa: ARG002 - Curator's signature
        """Curator's: load the model, once for each worker. Raises EmbedderError."""
        self._embedder = Embedder(
            self._model, column=self._columns, output_column=self._output_column, task=self._task, **self._options
        )

    def process(self, task: DocumentBatch) -> DocumentBatch:
        """Curator's: a batch with the new column, an Arrow table. Raises as the Embedder does."""
        if self._embedder is None:
            self.setup()
        assert self._embedder is not None  # noqa: S101 - setup
        return DocumentBatch(
            dataset_name=task.dataset_name,
            data=self._embedder(task.to_pyarrow()),
            _stage_perf=task._stage_perf,
            _metadata=task._metadata,
        )
