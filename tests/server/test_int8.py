"""`--dtype int8` through the server and the commands."""

from __future__ import annotations

import json

import pytest

from embert.server.cli.main import main


@pytest.mark.cpu("kernels")
def test_commands_take_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*arguments: str) -> str:
        with pytest.raises(SystemExit, match="0"):
            main((*arguments, "--device", "cpu", "--dtype", "int8"))
        return capsys.readouterr().out

    error_of = json.loads(printed("info", "--json"))
    assert error_of["dtype"] == "int8"
    assert error_of["agreement"]["worst"] >= 0.999
    assert error_of["agreement"]["neighbors"] >= 0.97
