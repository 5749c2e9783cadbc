"""The stage of NeMo Curator, in a pipeline on the cluster."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from embert import Engine
from tests.ray.conftest import LocalCluster

pytest.importorskip("ray", reason="ray is an extra")

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("nemo_curator") is None, reason="nemo-curator is an extra: curator"),
    pytest.mark.filterwarnings("ignore"),  # some three hundred modules of others
]

BATCHES = [["a cat", "a kitten"], ["a tax form"], ["größer"]]


@pytest.fixture(autouse=True)
def address(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Curator finds the cluster."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.nodes.address)


def test_the_page_embeds_documents(tmp_path: Path) -> None:
    from tests.ray import page

    page.write_texts(tmp_path)
    page.run("EmbedderStage", tmp_path)
    found = page.vectors(tmp_path, "embeddings")
    with Engine.load(device="cpu") as engine:
        wanted = engine.embed(page.TEXTS)
    np.testing.assert_allclose(np.array([found[text] for text in page.TEXTS], np.float32), wanted, atol=1e-6)


def test_batches_keep_what_they_have() -> None:
    import pandas
    from nemo_curator.backends.ray_actor_pool import RayActorPoolExecutor
    from nemo_curator.pipeline import Pipeline
    from nemo_curator.tasks import DocumentBatch

    from embert.ray.curator import EmbedderStage

    tasks = [
        DocumentBatch(dataset_name="texts", data=pandas.DataFrame({"text": texts, "batch": number}))
        for number, texts in enumerate(BATCHES)
    ]
    pipeline = Pipeline(name="embedding", stages=[EmbedderStage(num_gpus=0)])
    made = pipeline.run(executor=RayActorPoolExecutor(), initial_tasks=tasks)
    assert {task.dataset_name for task in made} == {"texts"}
    with Engine.load(device="cpu") as engine:
        for task in made:
            table = task.to_pyarrow()
            (number,) = set(table["batch"].to_pylist())
            assert table["text"].to_pylist() == BATCHES[number]
            found = np.array(table["embeddings"].to_pylist(), np.float32)
            np.testing.assert_allclose(found, engine.embed(BATCHES[number]), atol=1e-6)
    assert len(made) == len(BATCHES)
