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


def test_the_page_embeds_documents(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.ray import page

    monkeypatch.setenv("RAY_ADDRESS", cluster.nodes.address)  # where Curator finds the cluster
    page.write_texts(tmp_path)
    page.run("EmbedderStage", tmp_path)
    cluster.connect()
    found = page.vectors(tmp_path, "embeddings")
    with Engine.load(device="cpu") as engine:
        wanted = engine.embed(page.TEXTS)
    np.testing.assert_allclose(np.array([found[text] for text in page.TEXTS], np.float32), wanted, atol=1e-6)


def test_a_batch_keeps_what_it_has() -> None:
    import pandas
    from nemo_curator.tasks import DocumentBatch

    from embert.ray.curator import EmbedderStage

    stage = EmbedderStage(column="body", output_column="short", dimensions=64, num_gpus=0, num_cpus=2)
    assert (stage.resources.cpus, stage.resources.gpus) == (2, 0)
    assert (stage.inputs(), stage.outputs()) == ((["data"], ["body"]), (["data"], ["short"]))
    given = pandas.DataFrame({"body": ["a cat", "größer"], "id": [3, 4]})
    task = DocumentBatch(dataset_name="texts", data=given, _metadata={"source": "here"})
    assert stage.validate_input(task)
    made = stage.process(task)
    assert (made.dataset_name, made._metadata) == ("texts", {"source": "here"})
    table = made.to_pyarrow()
    assert table["id"].to_pylist() == [3, 4]
    assert [len(row) for row in table["short"].to_pylist()] == [64, 64]
