"""The Dockerfile, read: its stages and their instructions, for tests that do what they say."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field

from tests.server.live import ROOT


@dataclass(frozen=True)
class Instruction:
    """One, without its options."""

    name: str  # in capitals
    options: tuple[str, ...]  # --from=…, --mount=…
    value: str

    @property
    def words(self) -> list[str]:
        """The value as a list: of JSON in exec form, of shell words otherwise."""
        return json.loads(self.value) if self.value.startswith("[") else shlex.split(self.value)


@dataclass
class Stage:
    """From one FROM to the next."""

    name: str
    base: str  # another stage, or an image
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, name: str) -> list[Instruction]:
        """Its instructions of that name."""
        return [each for each in self.instructions if each.name == name]


def stages() -> dict[str, Stage]:
    """All of them, in the order of the file."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        options = re.match(r"(?:--\S+\s+)*", rest)
        assert options is not None
        instruction = Instruction(name, tuple(options[0].split()), rest[options.end() :].strip())
        if name == "FROM":
            base, _, alias = instruction.value.partition(" AS ")
            stage = found[alias] = Stage(alias, base)
        elif found:
            stage.instructions.append(instruction)
    return found
