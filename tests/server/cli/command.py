"""Runs `embert` in the process of the tests."""

from __future__ import annotations

import pytest

from embert.server.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Returns exit status, stdout, stderr."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err
