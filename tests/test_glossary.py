"""Public names of the code use no word that docs/glossary.md retires."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.server.live import ROOT

DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# At the beginning of a line: a type, or a function's type and name.
DECLARATION = re.compile(r"^(?:(?:struct|class|enum class) (\w+)|[a-z][\w:<>*&, ]* [*&]?(\w+)\()", re.MULTILINE)


def retired() -> set[str]:
    table = (ROOT / "docs" / "glossary.md").read_text().partition("## Retired words")[2]
    return {
        word for row in table.splitlines() if row.startswith("| `") for word in re.findall("`(.+?)`", row.split("|")[1])
    }


def public_names() -> Iterator[tuple[str, str]]:
    """(file, name) of modules and headers, and of the classes and functions in them."""
    for folder in ("engine", "server", "embert/ray"):
        for path in (ROOT / folder).rglob("*.py"):
            place = str(path.relative_to(ROOT))
            yield from ((place, part) for part in path.relative_to(ROOT).with_suffix("").parts)
            body = ast.parse(path.read_text()).body
            members = [member for each in body if isinstance(each, ast.ClassDef) for member in each.body]
            yield from ((place, each.name) for each in (*body, *members) if isinstance(each, DEFINITIONS))
    for path in (*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cuh")):
        place = str(path.relative_to(ROOT))
        yield place, path.stem
        yield from ((place, type_ or function) for type_, function in DECLARATION.findall(path.read_text()))


def words(name: str) -> str:
    """`MyName` and `my_name` as `_my_name_`."""
    return f"_{re.sub(r'(?<=[a-z0-9])(?=[A-Z])', '_', name).lower()}_"


def test_public_names_use_no_retired_word() -> None:
    capitalized = {word for word in retired() if word[0].isupper()}
    parts = retired() - capitalized
    assert len(capitalized) > 5
    assert len(parts) > 5
    names = {(place, name) for place, name in public_names() if not name.startswith("_")}
    assert len(names) > 1000
    found = [
        f"{place}: {name}"
        for place, name in sorted(names)
        if name in capitalized or any(f"_{part}_" in words(name) for part in parts)
    ]
    assert not found, "\n".join(found)
