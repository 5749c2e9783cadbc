"""The stage of NeMo Curator, in a pipeline on the cluster."""

from __future__ import annotations

import importlib.util

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


@pytest.mark.parametrize("executor", ["ray_data.RayDataExecutor", "ray_actor_pool.RayActorPoolExecutor"])
def test_a_pipeline_embeds_documents(cluster: LocalCluster, executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas
    from nemo_curator.pipeline import Pipeline
    from nemo_curator.tasks import DocumentBatch

    from embert.ray.curator import EmbedderStage

    monkeypatch.setenv("RAY_ADDRESS", cluster.nodes.address)
    room, _, kind = executor.partition(".")
    tasks = [
        DocumentBatch(dataset_name="texts", data=pandas.DataFrame({"text": texts, "batch": number}))
        for number, texts in enumerate(BATCHES)
    ]
    pipeline = Pipeline(name="embedding", stages=[EmbedderStage(num_gpus=0)])
    made = pipeline.run(
        executor=getattr(importlib.import_module(f"nemo_curator.backends.{room}"), kind)(), initial_tasks=tasks
    )
    assert {task.dataset_name for task in made} == {"texts"}
    with Engine.load(device="cpu") as engine:
        for task in made:
            table = task.to_pyarrow()
            (number,) = set(table["batch"].to_pylist())
            assert table["text"].to_pylist() == BATCHES[number]
            found = np.array(table["embeddings"].to_pylist(), np.float32)
            np.testing.assert_allclose(found, engine.embed(BATCHES[number]), atol=1e-6)
    assert len(made) == len(BATCHES)
