"""The tables of docs/checkpoints.md, from engine/files/key_tables.py."""

from __future__ import annotations

import json
from collections.abc import Iterable

from embert.engine.files.json_files import Key, Table, Verdict
from embert.engine.files.key_tables import REFUSED_MODULES, TABLES

START = "<!-- The tables below are written by scripts/document. -->\n"


def rows(table: Table) -> Iterable[str]:
    """The lines of a table; keys of which the same is said share one."""
    yield "| keys | | |"
    yield "|---|---|---|"
    grouped: list[tuple[Key, list[str]]] = []
    for name, key in table.items():
        names = next((names for other, names in grouped if other == key), None)
        if names is None:
            grouped.append((key, names := []))
        names.append(f"`{name}`")
    for key, names in grouped:
        accepted = ", ".join(f"`{json.dumps(value)}`" for value in key.accepted)
        note = f"{key.note}; accepted: {accepted}" if key.verdict is Verdict.REFUSED and accepted else key.note
        yield f"| {', '.join(names)} | {key.verdict} | {note} |"


def replaced(page: str) -> str:
    """Replace the tables in the page's text."""
    before, _, _ = page.partition(START)
    tables = ["\n".join([f"## {heading}\n", *rows(table)]) for heading, table in TABLES.items()]
    refused = "## Modules that are refused\n\n" + "\n".join(f"- `{name}`" for name in REFUSED_MODULES)
    return before + START + "\n" + "\n\n".join([*tables, refused]) + "\n"
