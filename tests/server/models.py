"""Model folders for tests: the default model, copied by links and then changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from embert import engine

__all__ = ["copy_model", "edit_json"]


def copy_model(folder: Path, *, without: tuple[str, ...] = ()) -> Path:
    """The default model's files, linked into `folder`, but for those named."""
    source = engine.load_model().folder
    for path in source.rglob("*"):
        target = folder / path.relative_to(source)
        if path.is_file() and path.name not in without:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path.resolve())
    return folder


def edit_json(path: Path, **values: Any) -> None:
    """Change a JSON file, which may be a link to one that must stay as it is, or not be there."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    path.write_text(json.dumps({**content, **values}))
