"""`--dtype int8` through the server and the commands."""

from __future__ import annotations

import json

import numpy as np
import pytest

from embert.engine import Engine
from embert.server.cli.main import main
from tests.server.live import live

TEXTS = ["a cat sat on the mat", "the dog barked at night", "interest rates rose again"]


@pytest.mark.cpu("kernels")
def test_the_server_logs_the_accuracy_of_int8() -> None:
    with live("--device", "cpu", "--dtype", "int8") as server:
        response = server.post("/embed", {"inputs": TEXTS}).json()
        server.wait_announced()
        assert server.get("/info").json()["model_dtype"] == "int8"
        assert "int8; " in server.log
        assert "cosine to float32 0.99" in server.log
        assert "of ten nearest neighbors kept (208 sentences)" in server.log
    with Engine.load(device="cpu") as exact:
        cosines = (np.array(response) * exact.embed(TEXTS)).sum(1)
    assert cosines.min() >= 0.999
    assert cosines.max() < 1 - 1e-5  # in eight bits indeed


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
