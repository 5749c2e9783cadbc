"""Whether this CPU multiplies eight bits exactly: embert refuses `--dtype int8` where it does not."""

from __future__ import annotations

import pytest

from embert.engine.encoders.cpu.linear import check_exact
from embert.engine.errors import UnsupportedModel

__all__ = ["needs_exact_sums"]


def _refusal() -> str:
    try:
        check_exact()
    except UnsupportedModel as error:
        return str(error)
    return ""


REFUSAL = _refusal()

needs_exact_sums = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)
