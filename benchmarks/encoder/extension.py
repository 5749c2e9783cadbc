"""A build of the CUDA encoder to use instead of the installed one."""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["use_build"]


def use_build(path: str) -> None:
    """Make the extension in this file embert.engine._cuda for the rest of this process."""
    spec = importlib.util.spec_from_file_location("embert.engine._cuda", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not an extension module: its name must end in .so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["embert.engine._cuda"] = module
