"""Several models in one server: a flood of one, its loading and its failures leave the others to work."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.live import STAND_IN, live, until
from tests.server.models import copy_model, three_heads
from tests.server.stand_in import HELD


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models by their names."""
    folder = tmp_path_factory.mktemp("two")
    return {"dense": copy_model(folder / "dense"), "heads": three_heads(folder / "heads")}


def test_a_flood_of_one_models_requests_refuses_none_of_another(folders: dict[str, Path]) -> None:
    """Each model has a budget of its own, while the engine works on neither."""
    models = [f"{name}={folders[name]}" for name in ("dense", "heads")]
    with live(*models, *STAND_IN, "--max-queue-tokens", "100") as running, ThreadPoolExecutor(40) as pool:
        held = {"inputs": [101, HELD, 102]}
        with running.held() as runs:
            first = pool.submit(running.post, "/models/dense/embed", held)
            until(runs.exists, what="a batch")
            flood = [pool.submit(running.post, "/models/dense/embed", {"inputs": "a cat sat"}) for _ in range(30)]
            refused = until(
                lambda: [each for each in flood if each.done() and each.result().status_code == 429], what="a refusal"
            )
            message = refused[0].result().json()["error"]
            assert all(value in message for value in ("dense", "100", "--max-queue-tokens"))
            others = [pool.submit(running.post, "/models/heads/embed", {"inputs": "a cat sat"}) for _ in range(10)]
            until(lambda: running.metrics()["embert_admitted_tokens"] >= 95 + 50, what="the others")
        assert first.result().status_code == 200
        assert {each.result().status_code for each in others} == {200}
        assert {each.result().status_code for each in flood} == {200, 429}


def test_models_that_fail_leave_the_others_to_work(folders: dict[str, Path], tmp_path: Path) -> None:
    """Whatever fails: the files' list, the tokenizer, or the weights."""
    unreadable, no_tokenizer, no_weights = (copy_model(tmp_path / name) for name in ("a", "b", "c"))
    (unreadable / "config.json").unlink()
    (unreadable / "config.json").write_text("{")
    (no_tokenizer / "tokenizer.json").unlink()
    (no_tokenizer / "tokenizer.json").write_text("{}")
    (no_weights / "model.safetensors").unlink()
    (no_weights / "model.safetensors").write_bytes(b"no weights")
    models = {"unread": unreadable, "tokens": no_tokenizer, "dense": folders["dense"], "weights": no_weights}
    options = [f"{name}={folder}" for name, folder in models.items()]
    with live(*options, "--device", "cpu") as running:
        ready = running.get("/readyz").json()
        assert ready["models"] == {"unread": "failed", "tokens": "failed", "dense": "ready", "weights": "failed"}
        assert ready["status"] == "ready"
        for name in ("unread", "tokens", "weights"):
            assert f"{name} has failed (" in ready["detail"]
            of_one = running.get(f"/readyz/{name}")
            assert (of_one.status_code, of_one.json()["status"]) == (503, "failed")
            for path in ("/v1/embeddings", f"/models/{name}/v1/embeddings", f"/models/{name}/embed", f"/models/{name}"):
                refused = running.post(path, {"input": "a", "inputs": "a", "model": name})
                assert refused.status_code == 503, refused.text
                assert f"{name} has failed (" in refused.text
        assert running.post("/v1/embeddings", {"input": "a", "model": "dense"}).status_code == 200
        assert sorted(each["id"] for each in running.get("/v1/models").json()["data"]) == sorted(models)


def test_readiness_waits_for_the_first_load_of_every_model(folders: dict[str, Path]) -> None:
    models = [f"{name}={folders[name]}" for name in ("dense", "heads")]
    with live(*models, *STAND_IN, loading=True) as running:
        until(lambda: "dense is not ready" in running.get("/readyz").text, what="an HTTP process's answer")
        answer = running.get("/readyz")
        assert (answer.status_code, answer.json()["models"]) == (503, {"dense": "loading", "heads": "loading"})
        assert "dense is not ready (loading" in answer.json()["detail"]
        refused = running.post("/models/heads/embed", {"inputs": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert refused.json()["error"].startswith("heads is not ready (loading")
        running.end_loading()
        running.wait_ready()
        assert running.post("/models/heads/embed", {"inputs": "a"}).status_code == 200
