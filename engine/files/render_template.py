"""Renders a chat template in a separate process, whose time and memory are bounded: a template may ask for anything.

Run as a file, with JSON on standard input, so that it imports jinja2 and nothing of embert. chat_template.py calls it.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

MEMORY_BYTES, CPU_S = 1 << 30, 2
MOST_CHARACTERS = 1 << 20


def main() -> None:
    """Read a template, and variables for each rendering; write the texts, or what is wrong."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    request = json.load(sys.stdin)
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError:
        json.dump({"missing": "jinja2"}, sys.stdout)
        return

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    # As transformers makes both; json.dumps has further options, which call what a template gives them.
    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(
            value, ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=bool(sort_keys)
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    try:
        template = environment.from_string(request["source"])
        texts = [template.render(**variables) for variables in request["renderings"]]
    except MemoryError:
        json.dump({"error": f"it takes more than {MEMORY_BYTES >> 20} MiB"}, sys.stdout)
    except Exception as error:  # noqa: BLE001 - whatever a template does is an error of the template
        json.dump({"error": f"{type(error).__name__}: {error}"[:500]}, sys.stdout)
    else:
        if sum(map(len, texts)) > MOST_CHARACTERS:
            json.dump({"error": f"it renders more than {MOST_CHARACTERS} characters"}, sys.stdout)
        else:
            json.dump({"texts": texts}, sys.stdout)


if __name__ == "__main__":
    main()
