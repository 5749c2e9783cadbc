"""What vectors depend on, except the texts: a run goes on only where they are the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from embert.engine import Model
from embert.engine.tasks import Task
from embert.server.bulk.child import Ready
from embert.server.bulk.job import Job

__all__ = ["facts_of"]


def facts_of(
    job: Job, model: Model, engines: Sequence[Ready], identity: list[list[object]] | None, shard_rows: int | None
) -> dict[str, Any]:
    """The facts, by the names that people know them by; `identity` is that of the input's files."""
    facts: dict[str, Any] = {"model": model.model_id, "revision": model.revision}
    if not re.fullmatch("[0-9a-f]{40}", model.revision or ""):  # a commit says what the files are
        # Modules, heads and adapters have folders of their own.
        folders = [model.folder, *([] if model.base is None else [model.base])]
        facts["model's files"] = {
            str(path.relative_to(folder.parent)): [path.stat().st_size, path.stat().st_mtime_ns]
            for folder in folders
            for path in sorted(folder.rglob("*"))
            if path.suffix in (".json", ".safetensors", ".txt")
        }
    facts |= {
        "pooling": model.pooling,
        # Not how many devices there are, nor which: whichever is free next takes a block.
        "encoder": sorted({engine.encoder for engine in engines}),
        "device": sorted({engine.device for engine in engines}),
        "dtype": sorted({engine.dtype for engine in engines}),
        "--sparse": job.task == Task.SPARSE,
        "--multi": job.task == Task.MULTI,
        "--queries": job.is_query,
        "--task": job.adapter,
        "--prompt-name": job.prompt_name,
        "--dimensions": job.dimensions,
        "--no-normalize": not job.normalize,
        "--no-truncate": not job.truncate,
        "--input-format": job.input_format,
        "--column": job.column,
        "--keep": None if job.kept is None else list(job.kept),
        "--output-format": job.output_format,
        "--shard-texts": shard_rows,
        "--on-error": "skip" if job.skip_bad_rows else "fail",
        "kept columns": job.schema.hex(),
    }
    return facts | {f"input file {number}": file for number, file in enumerate(identity or (), 1)}
