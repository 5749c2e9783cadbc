"""The record of a run: a table on the screen, and a JSON file with machine, versions, date and command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = (
    "embert", "fastapi", "httptools", "numpy", "nvidia-cutlass", "onnxruntime", "orjson", "pydantic",
    "sentence-transformers", "starlette", "tokenizers", "torch", "transformers", "uvicorn", "uvloop",
)  # fmt: skip


def machine() -> dict[str, Any]:
    """Return the hardware, the driver and the versions that a figure depends on."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "gpu": _output("nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def write(name: str, figures: Any, folder: Path = RESULTS) -> Path:
    """Write `figures` to NAME-DEVICE.json, replacing the last run on such a device, and return the path.

    DEVICE is the GPU, or the processor and the number of cores that this process may use.
    """
    about = machine()
    document = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", _module(), *sys.argv[1:]]),
        "commit": _COMMIT,
        "machine": about,
        "figures": figures,
    }
    device = (about["gpu"] or f"{_short_name(about['cpu'])} {about['cores']} cores").split(",")[0]
    path = folder / f"{name}-{re.sub(r'[^a-z0-9]+', '-', device.lower())}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_lines(document) + "\n")
    return path


def _lines(value: Any, indent: str = "") -> str:
    """Format as JSON: one line per row of figures, and per value of a dict that has containers in it."""
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        lines = [json.dumps(each) for each in value]
    elif isinstance(value, dict) and any(isinstance(each, dict | list) for each in value.values()):
        lines = [f"{json.dumps(key)}: {_lines(each, indent + ' ')}" for key, each in value.items()]
    else:
        return json.dumps(value)
    first, last = "[]" if isinstance(value, list) else "{}"
    return f"{first}\n{indent} " + f",\n{indent} ".join(lines) + f"\n{indent}{last}"


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table, aligned for a terminal: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    for row in (head, rule, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("| " + " | ".join(cells) + " |", flush=True)


def _module() -> str:
    """Return the name that `python -m` was given."""
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem


def _cpu_model() -> str:
    match = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1] if match else platform.processor()


def _short_name(cpu: str) -> str:
    """Shorten a processor's name: "Intel(R) Xeon(R) Processor" is "Intel Xeon"."""
    return re.sub(r"\((R|TM)\)|\b(CPU|Processor|\d+-Core)\b|@.*", "", cpu).strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


_COMMIT = _output("git", "describe", "--always", "--dirty")  # read at the start: commits may follow during a long run
