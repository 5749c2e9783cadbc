"""The manifest that a resumed run compares with the earlier run, and files that survive a crash."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from embert.engine import Model
from embert.engine.tasks import Task
from embert.server.bulk.job import CannotResume, Job

_SAMPLE_BYTES, _SAMPLE_INTERVAL = 4096, 1 << 20


def run_manifest(
    job: Job, model: Model, engines: Sequence[Mapping[str, str]], shard_rows: int | None
) -> dict[str, Any]:
    """Everything that the output depends on except the input, by the names that users know.

    `engines` has the encoder, device and dtype of each.
    """
    manifest: dict[str, Any] = {"model": model.model_id, "revision": model.revision}
    if not re.fullmatch("[0-9a-f]{40}", model.revision or ""):  # a commit identifies the files
        # Modules, heads and adapters have their own folders.
        folders = [model.folder, *([] if model.base is None else [model.base])]
        manifest["model's files"] = {
            str(path.relative_to(folder.parent)): [path.stat().st_size, path.stat().st_mtime_ns, _digest(path)]
            for folder in folders
            for path in sorted(folder.rglob("*"))
            if path.suffix in (".json", ".safetensors", ".txt")
        }
    manifest["pooling"] = model.pooling
    # Neither the number of devices nor their indices: any free engine takes a block.
    manifest |= {name: sorted({engine[name] for engine in engines}) for name in ("encoder", "device", "dtype")}
    return manifest | {
        "--sparse": job.task == Task.SPARSE,
        "--multi": job.task == Task.MULTI,
        "--queries": job.is_query,
        "--task": job.adapter,
        "--prompt-name": job.prompt_name,
        "--instruction": job.instruction,
        "--dimensions": job.dimensions,
        "--no-normalize": not job.normalize,
        "--no-truncate": not job.truncate,
        "--input-format": job.input_format,
        "--column": job.column,
        "--keep": None if job.kept_columns is None else list(job.kept_columns),
        "--output-format": job.output_format,
        "--shard-texts": shard_rows,
        "--on-error": "skip" if job.skip_invalid_rows else "fail",
        "kept columns": job.schema.hex(),
    }


def _digest(path: Path) -> str:
    """SHA-256 of a file. Weights may have many gigabytes, so only samples of them count."""
    with path.open("rb") as file:
        if path.suffix != ".safetensors":
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        for offset in range(0, path.stat().st_size, _SAMPLE_INTERVAL):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def check_manifest(before: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Raise CannotResume if what is complete was made from another manifest. Both are as read from JSON."""
    for name in {**before, **now}:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            changed = sorted(key for key in {**old, **new} if old.get(key) != new.get(key))
            if changed:
                raise CannotResume(f"{name} have changed since {path} was begun: {', '.join(changed)}")
        elif old != new:
            raise CannotResume(f"{name} was {old!r} in {path}, and is {new!r}")


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically. Raises OSError."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            file.write(orjson.dumps(content, option=orjson.OPT_INDENT_2))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Make new names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
