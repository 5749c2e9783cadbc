"""Several models in one server: a flood of one, its loading and its failures leave the others to work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.server.live import live
from tests.server.models import build_classifier, copy_model, three_heads


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models by their names."""
    folder = tmp_path_factory.mktemp("two")
    return {"dense": copy_model(folder / "dense"), "heads": three_heads(folder / "heads")}


def test_models_that_fail_leave_the_others_to_work(folders: dict[str, Path], tmp_path: Path) -> None:
    """Whatever fails: the folder, the files' list, the tokenizer, the weights, or what comes of them."""
    nan = build_classifier(tmp_path / "nan", "a")
    tensors = load_file(nan / "model.safetensors")
    tensors["classifier.bias"][:] = np.nan
    save_file(tensors, nan / "model.safetensors")
    unreadable, no_tokenizer, no_weights = (copy_model(tmp_path / name) for name in ("a", "b", "c"))
    (unreadable / "config.json").unlink()
    (unreadable / "config.json").write_text("{")
    (no_tokenizer / "tokenizer.json").unlink()
    (no_tokenizer / "tokenizer.json").write_text("{}")
    (no_weights / "model.safetensors").unlink()
    (no_weights / "model.safetensors").write_bytes(b"no weights")
    models = {"unread": unreadable, "tokens": no_tokenizer, "dense": folders["dense"], "weights": no_weights}
    models |= {"nan": nan, "gone": tmp_path / "gone"}
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
