"""Ray Data with the stage in it: every text once, whatever ends meanwhile."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embert import Engine
from tests.ray.conftest import LocalCluster
from tests.server.live import until

pa = pytest.importorskip("pyarrow", reason="pyarrow is of the extra ray")
page = pytest.importorskip("tests.ray.page", reason="needs pyarrow")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own settings, as Ray reads them
]

BATCH = 128  # of vectors that fill 200 kB: Ray keeps less than 100 kB with the driver, not in a node's object store
DOOMED = "tests.ray.doomed:create"


def text_of(number: int) -> str:
    return f"text {number} about " + "many words " * (number % 7)


def numbered(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "text": np.array([text_of(number) for number in batch["id"].tolist()])}


def dataset(texts: int) -> Any:
    """Texts that are made on the nodes, in many blocks, so that a node that is lost takes some of them along."""
    import ray.data

    return ray.data.range(texts, override_num_blocks=texts // BATCH).map_batches(numbered)


def embedded(texts: int, actors: int, **options: Any) -> Any:
    """Texts with their vectors, by a number of actors, each on another node."""
    import ray.data

    from embert.ray import Embedder

    return dataset(texts).map_batches(
        Embedder,
        fn_constructor_kwargs=options,
        compute=ray.data.ActorPoolStrategy(size=actors),
        batch_format="pyarrow",
        batch_size=BATCH,
        resources={"embedder": 1},
    )


def check(made: Any, texts: int) -> None:
    """Every text is there once, with the stand-in's vector."""
    import ray

    tables = ray.get(made.to_arrow_refs())
    assert {table.schema.field("embedding").type for table in tables} == {pa.list_(pa.float32(), 384)}
    rows = sorted((row for table in tables for row in table.to_pylist()), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(texts))
    assert [row["text"] for row in rows] == [text_of(number) for number in range(texts)]
    with Engine.load(device="cpu", encoder="tests.server.stand_in:create") as engine:
        wanted = engine.embed([text_of(number) for number in range(texts)])
    np.testing.assert_array_equal(np.array([row["embedding"] for row in rows], np.float32), wanted)


def test_the_page_embeds_a_dataset(cluster: LocalCluster, tmp_path: Path) -> None:
    page.write_texts(tmp_path)
    page.run("map_batches", tmp_path)
    found = page.vectors(tmp_path, "embedding")
    with Engine.load(device="cpu") as engine:
        wanted = engine.embed(page.TEXTS)
    np.testing.assert_allclose(np.array([found[text] for text in page.TEXTS], np.float32), wanted, atol=1e-6)


def test_a_node_is_killed_while_it_works(cluster: LocalCluster) -> None:
    """Its actor is in a forward and its object store holds vectors already; another node takes its place."""
    node = cluster.add_node(embedder=1)
    fate, working = cluster.folder / "fate", cluster.folder / "working"
    fate.write_text(node.node_id)

    with ThreadPoolExecutor(1) as other:  # nodes are started from the main thread
        made = other.submit(embedded(1024, 2, encoder=DOOMED).materialize)
        until(lambda: working.exists() or made.done(), 200, what="a forward on the node")
        cluster.kill(node)
        cluster.add_node(embedder=1)
    fate.unlink()
    check(made.result(), 1024)


class Assigned:
    """An actor that says what its engine would run on."""

    def device(self, asked: str) -> tuple[str, str | None]:
        from embert.ray.gpus import assigned_device

        return assigned_device(asked), os.environ.get("CUDA_VISIBLE_DEVICES")

    def load(self) -> None:
        from embert.ray import Embedder

        Embedder()


def test_an_engine_runs_on_what_ray_assigns(cluster: LocalCluster) -> None:
    """Also where the node has a GPU that is another's."""
    import ray

    actor: Any = ray.remote(Assigned)
    one, none, two = (actor.options(num_gpus=gpus, num_cpus=0.1) for gpus in (1, 0, 2))
    with_gpu = one.remote()
    assert ray.get(with_gpu.device.remote("auto")) in (("cuda", "0"), ("cuda", "1"))
    assert ray.get(with_gpu.device.remote("cpu"))[0] == "cpu"
    assert ray.get(none.remote().device.remote("auto"))[0] == "cpu"
    ray.kill(with_gpu)
    with pytest.raises(ray.exceptions.RayTaskError, match=r"GPU.* 2"):
        ray.get(two.remote().load.remote())
