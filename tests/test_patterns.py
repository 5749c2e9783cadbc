"""Regular expressions of the package take linear time, whatever a client or a checkpoint writes."""

from __future__ import annotations

import ast
import importlib
import re
import string
import time
from collections.abc import Iterator
from pathlib import Path
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

import pytest

import embert

PACKAGE = Path(embert.__file__).parent
SIZES = (1_000, 100_000)  # a pattern that takes quadratic time fails at the second
MOST_S = 10.0  # of CPU, where linear time takes less than 0.1
# Values of local variables that patterns are made of.
LOCALS: dict[str, Any] = {
    "field": "inputs", "name": b'"inputs"', "own": ["weight"], "spaces": " \n", "kind": "[ -]",
    "rules": ["(?<=a)(?=[ \n]a)"], "pattern": "a",
}  # fmt: skip
CHARACTERS = [*string.printable, "\0", "é", "日"]


def patterns() -> Iterator[tuple[str, str, Any]]:
    """The place, the method and the pattern of every regular expression that the package uses."""
    for folder in ("engine", "server"):
        for path in sorted((PACKAGE / folder).resolve().rglob("*.py")):
            source = path.read_text()
            if "re." not in source or not re.search("^import re$", source, re.MULTILINE):
                continue
            relative = path.relative_to((PACKAGE / folder).resolve()).with_suffix("")
            module = importlib.import_module(".".join(["embert", folder, *relative.parts]).removesuffix(".__init__"))
            for name, value in vars(module).items():
                if isinstance(value, re.Pattern):
                    for method in {*re.findall(rf"\b{name}\.(\w+)\(", source)} or {"search"}:
                        yield f"{folder}/{relative}.{name}", method, value
            for call in ast.walk(ast.parse(source)):
                if isinstance(call, ast.Call) and re.match(r"re\.\w+$", ast.unparse(call.func)) and call.args:
                    method = ast.unparse(call.func).removeprefix("re.")
                    if method in ("escape", "compile"):
                        continue
                    expression = compile(ast.Expression(call.args[0]), str(path), "eval")
                    value = eval(expression, {**vars(module), **LOCALS})
                    yield f"{folder}/{relative}:{call.lineno}", method, re.compile(value)


def sample(nodes: Any, state: Any) -> str:
    """A short text that matches these nodes of a parsed pattern, where one is found easily."""
    text = ""
    for operation, argument in nodes:
        match operation:
            case _constants.SUBPATTERN:
                text += sample(argument[-1], state)
            case _constants.ATOMIC_GROUP:
                text += sample(argument, state)
            case _constants.BRANCH:
                text += sample(argument[1][0], state)
            case _constants.MAX_REPEAT | _constants.MIN_REPEAT | _constants.POSSESSIVE_REPEAT:
                text += max(1, argument[0]) * sample(argument[2], state)
            case _constants.AT | _constants.ASSERT | _constants.ASSERT_NOT:
                pass
            case _:
                text += members(operation, argument, state)[0]
    return text


def members(operation: Any, argument: Any, state: Any) -> list[str]:
    """Some of the characters of a class, of each kind that it has."""
    pattern = _compiler.compile(_parser.SubPattern(state, [(operation, argument)]))
    found = [character for character in CHARACTERS if pattern.fullmatch(character)]
    return [*dict.fromkeys((*found[:1], *(c for c in found if c in ' "\\,;0a['), *found[-1:]))] or ["a"]


def repetitions(nodes: Any, state: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """The text before each repetition, and the repeated text."""
    for node in nodes:
        operation, argument = node
        match operation:
            case _constants.MAX_REPEAT | _constants.MIN_REPEAT | _constants.POSSESSIVE_REPEAT:
                inner = argument[2]
                yield from repetitions(inner, state, before)
                if argument[1] is _constants.MAXREPEAT:
                    yield before, sample(inner, state)
                    for operation_, argument_ in inner:
                        if operation_ is _constants.IN:
                            yield from ((before, character) for character in members(operation_, argument_, state))
            case _constants.SUBPATTERN | _constants.ATOMIC_GROUP:
                yield from repetitions(argument[-1] if operation is _constants.SUBPATTERN else argument, state, before)
            case _constants.BRANCH:
                for branch in argument[1]:
                    yield from repetitions(branch, state, before)
        before += sample([node], state)


def work(pattern: Any, method: str, text: str | bytes) -> None:
    if method in ("sub", "subn", "split", "findall", "finditer"):
        for _ in pattern.finditer(text):
            pass
    else:
        getattr(pattern, method)(text)


@pytest.mark.parametrize(("place", "method", "pattern"), [pytest.param(*each, id=each[0]) for each in patterns()])
def test_takes_linear_time(place: str, method: str, pattern: re.Pattern[Any]) -> None:
    text = pattern.pattern.decode("latin-1") if isinstance(pattern.pattern, bytes) else pattern.pattern
    flags = pattern.flags & ~re.UNICODE if isinstance(pattern.pattern, bytes) else pattern.flags
    tree = _parser.parse(text, flags)
    for before, unit in dict.fromkeys(repetitions(tree, tree.state)):
        for size in SIZES:
            for end in ("", "\0", "\n"):
                attack: str | bytes = before + unit * (size // len(unit)) + end
                if isinstance(pattern.pattern, bytes) and isinstance(attack, str):
                    attack = attack.encode()
                began = time.thread_time()
                work(pattern, method, attack)
                assert time.thread_time() - began < MOST_S, (before, unit, size)
