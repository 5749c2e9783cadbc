"""Writes what is made from code and results: tables of docs, README's picture, the names of the chart's options.

    python -m scripts.generate [--check]

--check writes nothing, names the files that are not current, and exits with 1 if there are any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from embert.server.config import environment_names
from scripts.generate import fields, figures, key_tables, metric_tables, model_tables, result_tables

ROOT = Path(__file__).parents[2]


def readme(page: str) -> str:
    """Replace README's tables and the words of its picture."""
    page = model_tables.replaced(result_tables.replaced(page, result_tables.readme), model_tables.readme)
    return re.sub('(?<=<img alt=")[^"]*', figures.alt(), page)


FILES: dict[str, Callable[[str], str]] = {
    "README.md": readme,
    "docs/api.md": fields.replaced,
    "docs/benchmarks.md": lambda page: result_tables.replaced(page, *result_tables.BENCHMARKS),
    "docs/checkpoints.md": key_tables.replaced,
    "docs/encoder.md": lambda page: result_tables.replaced(page, result_tables.exactness),
    "docs/images/figures-dark.svg": lambda _: figures.svg("dark"),
    "docs/images/figures-light.svg": lambda _: figures.svg("light"),
    "docs/metrics.md": lambda _: metric_tables.document(),
    "docs/models.md": lambda page: model_tables.replaced(page, model_tables.models),
    "docker/helm/embert/files/options.txt": lambda _: "\n".join(environment_names()) + "\n",
}


def main() -> None:
    """Write every file, or check them."""
    check = sys.argv[1:] == ["--check"]
    stale = []
    for name, replaced in FILES.items():
        path = ROOT / name
        before = path.read_text()
        if (after := replaced(before)) != before:
            stale.append(name)
            if not check:
                path.write_text(after)
    if check and stale:
        sys.exit(f"not current: {', '.join(stale)}; run scripts/document")


if __name__ == "__main__":
    main()
