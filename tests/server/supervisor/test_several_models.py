"""Several models in one server: each becomes ready by itself, and none takes the others along."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.server import crowd
from tests.server.crowd import GOOD
from tests.server.live import PATIENT, STAND_IN, Live, live, until
from tests.server.models import build_classifier, copy_model
from tests.server.stand_in import CRASH, HELD


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models that embed and one that reranks."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("a", "b"):
        copy_model(folder / name)
    return {"a": folder / "a", "b": folder / "b", "rank": build_classifier(folder / "rank", "relevant")}


@pytest.fixture
def named(folders: dict[str, Path]) -> list[str]:
    return [f"{name}={folder}" for name, folder in folders.items()]


def right(server: Live, model: str, ids: list[int] = GOOD) -> bool:
    return crowd.right(server, ids, f"/models/{model}/embed")


def state(server: Live, model: str) -> str:
    response = server.try_get(f"/readyz/{model}")
    if response is None:  # the process that responds during the start ends
        return "no response"
    return str(response.json()["models"][model]) if response.status_code == 200 else str(response.status_code)


def test_a_model_is_ready_while_another_loads(named: list[str]) -> None:
    with live(*named, *STAND_IN, env={"STAND_IN_LOAD_MODEL": "/b"}, loading=True) as server:
        until(lambda: state(server, "a") == "ready", what="the first model")
        assert right(server, "a")
        response = server.get("/readyz")
        assert (response.status_code, response.json()["models"]["b"]) == (503, "loading")
        assert "b is not ready (loading" in response.json()["detail"]
        assert server.get("/readyz/b").status_code == 503
        response = server.post("/models/b/embed", {"inputs": [GOOD]})
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        assert response.json()["error"].startswith("b is not ready (loading")
        server.end_loading()
        server.wait_ready()
        assert right(server, "b")
        server.wait_announced()
        assert "models: 3 of 3" in server.log


def test_a_model_that_ends_its_process_while_it_loads_is_left_out(named: list[str]) -> None:
    env = {"STAND_IN_LOAD_MODEL": "/b", "STAND_IN_LOAD": "exit"}
    with live(*named, *STAND_IN, env=env, ready=False, clean_log=False) as server:
        server.wait_announced()
        server.wait_ready()  # an HTTP process learns of it a moment later
        assert "models: 2 of 3" in server.log
        assert right(server, "a")
        assert "ended with status 3 while it loaded this model, 3 times" in server.get("/readyz/b").text
        assert server.get("/readyz").status_code == 200
        # Left out of later starts, too.
        server.kill_engine()
        until(lambda: right(server, "a"), what="a response")
        assert "3 times" in server.get("/readyz/b").text


def test_when_no_model_can_be_loaded_the_server_ends(named: list[str]) -> None:
    with live(*named, *STAND_IN, env={"STAND_IN_LOAD": "error"}, ready=False, status=1) as server:
        assert server.wait() == 1
        assert server.log.count("the stand-in was told not to load") == 3


def test_an_engine_that_dies_in_one_model_serves_the_others(named: list[str]) -> None:
    """Requests of another model are sent again; only the one at fault fails. The model is quarantined in the end."""
    with live(*named, *STAND_IN, env=PATIENT, clean_log=False) as server, ThreadPoolExecutor(12) as pool:
        with server.held() as runs:
            held = pool.submit(server.post, "/models/b/embed", {"inputs": [[101, HELD, 102]]})
            until(runs.exists, what="a forward")
            asked = [pool.submit(right, server, "a", [101, 2000 + number, 102]) for number in range(8)]
            killer = pool.submit(server.post, "/models/b/embed", {"inputs": [[101, CRASH, 102]]})
            until(lambda: server.metrics()["embert_admitted_tokens"] == 30, what="all of them")
        assert held.result().status_code == 200
        assert killer.result().status_code == 424
        assert all(each.result() for each in asked)
        until(lambda: state(server, "b") == "ready", what="the model that killed the engine")
        assert right(server, "b")
        assert server.metrics()["embert_admitted_tokens"] == 0
        while "b is quarantined" not in server.log:
            until(lambda: all(state(server, name) == "ready" for name in ("a", "b", "rank")), what="all models")
            server.post("/models/b/embed", {"inputs": [[101, CRASH, 102]]}, timeout=120)
            until(lambda: right(server, "a"), what="a response of the other model")
        assert "quarantined for 60 s" in server.get("/readyz/b").text
        response = server.post("/models/b/embed", {"inputs": [GOOD]})
        assert response.status_code == 503
        assert "repeatedly in forwards" in response.json()["error"]
        assert right(server, "a")
        assert server.get("/readyz").status_code == 200


ABORTS = """
import os, sys
if "embert.server.frontend.process" in sys.orig_argv:
    from embert.engine.tokenization import library
    read = library.read_object
    library.read_object = lambda path: os.abort() if "/b/" in str(path) else read(path)
"""


def test_a_tokenizer_that_ends_http_processes_is_left_out(named: list[str]) -> None:
    """No error can be caught where a library aborts; this one does, in HTTP processes, on the files of a model."""
    with live(*named, *STAND_IN, code=ABORTS, ready=False, clean_log=False) as server:
        server.wait_announced()
        server.wait_ready()
        assert "models: 2 of 3" in server.log
        assert right(server, "a")
        assert "SIGABRT" in server.get("/readyz/b").text


def test_models_that_fail_leave_the_others_to_work(tmp_path: Path) -> None:
    """Whatever fails: the folder, the files' list, the tokenizer, the weights, or what comes of them."""
    nan = build_classifier(tmp_path / "nan", "a")
    tensors = load_file(nan / "model.safetensors")
    tensors["classifier.bias"][:] = np.nan
    save_file(tensors, nan / "model.safetensors")
    models = {"nan": nan, "gone": tmp_path / "gone", "dense": copy_model(tmp_path / "dense")}
    for name, file, content in (
        ("unread", "config.json", b"{"),
        ("tokens", "tokenizer.json", b"{}"),
        ("weights", "model.safetensors", b"no weights"),
    ):
        models[name] = copy_model(tmp_path / name, without=(file,))
        (models[name] / file).write_bytes(content)
    options = [f"{name}={folder}" for name, folder in models.items()]
    with live(*options, "--device", "cpu") as running:
        ready = running.get("/readyz").json()
        assert ready["models"] == {name: "ready" if name == "dense" else "failed" for name in models}
        assert ready["status"] == "ready"
        for refused in (running.get("/readyz/nan"), running.post("/models/nan/predict", {"inputs": "a"})):
            assert refused.status_code == 503
            assert "finite" in refused.text
        for name in models.keys() - {"dense", "nan"}:
            assert f"{name} has failed (" in ready["detail"]
            of_one = running.get(f"/readyz/{name}")
            assert (of_one.status_code, of_one.json()["status"]) == (503, "failed")
            for path in ("/v1/embeddings", f"/models/{name}/v1/embeddings", f"/models/{name}/embed", f"/models/{name}"):
                refused = running.post(path, {"input": "a", "inputs": "a", "model": name})
                assert refused.status_code == 503, refused.text
                assert f"{name} has failed (" in refused.text
        assert running.post("/v1/embeddings", {"input": "a", "model": "dense"}).status_code == 200
        assert sorted(each["id"] for each in running.get("/v1/models").json()["data"]) == sorted(models)
