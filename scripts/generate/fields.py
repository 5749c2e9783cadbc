"""The table of fields in docs/api.md.

Its rows are those of server/protocols/fields.py: fields of which the same is true on the same routes are one row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from embert.server.frontend.routes import TASKS
from embert.server.protocols.fields import ELSEWHERE
from embert.server.request.known_fields import KnownField, Verdict

_MARKS = re.compile(r"(?<=<!-- fields: scripts/document writes them -->\n).*?(?=<!-- end of fields -->)", re.DOTALL)

_FEW = 3  # routes without a field, which are named in place of those with it


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Fields, the APIs that have them, routes, and what becomes of them."""
    routes: dict[tuple[str, str], dict[str, list[str]]] = {}
    for task in TASKS:
        for name, field in task.request.known.items():
            if field.reason == ELSEWHERE:
                continue
            key = ", ".join(api.value for api in field.apis), _becomes(field)
            routes.setdefault(key, {}).setdefault(name, []).append(f"`{task.path}`")
    everywhere = {f"`{task.path}`" for task in TASKS}
    for (apis, becomes), names in routes.items():
        by_routes: dict[tuple[str, ...], list[str]] = {}
        for name, paths in names.items():
            by_routes.setdefault(tuple(dict.fromkeys(paths)), []).append(f"`{name}`")
        for route_paths, together in by_routes.items():
            missing = sorted(everywhere.difference(route_paths))
            few = f"all but {', '.join(missing)}" if missing else "all"
            where = few if len(missing) <= _FEW else ", ".join(route_paths)
            yield ", ".join(together), apis, where, becomes


def _becomes(field: KnownField) -> str:
    if field.verdict is Verdict.HONORED:
        dropped = f"; dropped if `{field.ignored_with}` is given" if field.ignored_with else ""
        return f"honored{': ' + field.reason if field.reason else ''}{dropped}"
    if field.verdict in (Verdict.HARMLESS, Verdict.IGNORED):
        return f"{field.verdict.value}: {field.reason}"
    values = " or ".join(f"`{json.dumps(value)}`" for value in field.unless)
    return f"refused{', unless ' + values if values else ''}: {field.reason}"


def replaced(page: str) -> str:
    """Replace the table in the page's text."""
    order = [Verdict.HONORED.value, Verdict.HARMLESS.value, Verdict.IGNORED.value, Verdict.REFUSED.value]
    table = sorted(rows(), key=lambda row: order.index(re.split("[ :;,]", row[3])[0]))
    lines = ["| fields | of | routes | |", "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in table)]
    return _MARKS.sub(lambda _: "\n".join(lines) + "\n", page, count=1)
