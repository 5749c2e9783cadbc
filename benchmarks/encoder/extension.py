"""Which build of the CUDA encoder a process uses, where it is not the installed one."""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["use_build"]


def use_build(path: str) -> None:
    """Let embert.engine._cuda be the extension in this file, for all that this process does from now on."""
    spec = importlib.util.spec_from_file_location("embert.engine._cuda", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no extension module: its name must end in .so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["embert.engine._cuda"] = module
