"""The server on a GPU: it picks the CUDA encoder by itself, and its vectors are those of float32 on the CPU."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from embert.engine import Engine, load_model
from embert.engine.encoders.cuda import encoder as cuda
from embert.engine.encoders.devices import devices
from embert.engine.errors import UnsupportedModel
from tests.oracles.jina_v3 import INSTRUCTIONS, TASKS, VOCABULARY, flash
from tests.oracles.model_cases import byte_level
from tests.server.live import Live, live, until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda.unavailable_reason() is not None, reason=cuda.unavailable_reason() or ""),
]

# A model folder instead of the packaged one, for machines that lack that package.
MODEL = [path] if (path := os.environ.get("EMBERT_TEST_MODEL")) else []
ONE_GPU = [*MODEL, "--device", "cuda:0"]


def test_vectors_over_http_are_those_of_float32_on_the_cpu() -> None:
    texts = [f"text {number}: {'embeddings of many lengths, ' * (number % 40)}" for number in range(200)]
    with Engine.load(MODEL[0] if MODEL else None, device="cpu", dtype="float32") as reference:
        wanted = reference.embed(texts)
    with live(*ONE_GPU) as server:
        info = server.get("/info").json()
        assert (info["backend"], info["model_dtype"]) == ("cuda", "float16")
        assert info["device"] == "cuda:0"
        together = np.array(server.post("/embed", {"inputs": texts}).json(), np.float32)
        single = [server.post("/embed", {"inputs": text}).json()[0] for text in texts[::20]]
        assert server.metrics()["embert_padding_tokens_total" + '{engine="0"}'] == 0
    assert (together * wanted).sum(axis=1).min() > 0.9999
    np.testing.assert_array_equal(together[::20], np.array(single, np.float32))  # batch-invariant


def wait_for_log(server: Live, text: str) -> None:
    until(lambda: text in server.log, what=f"the log's {text!r}")


@pytest.fixture
def cublaslt() -> None:
    """Skips the test where this build was made without cuBLASLt's header."""
    try:
        cuda.CudaEncoder(load_model(*MODEL), max_batch_tokens=512, gemm="cublaslt", graphs=False).close()
    except UnsupportedModel as error:
        if "this build has no cuBLASLt" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.usefixtures("cublaslt")
def test_the_portable_path_can_be_asked_for_and_agrees() -> None:
    texts = [f"text {number}: {'embeddings of many lengths, ' * (number % 40)}" for number in range(200)]
    vectors = []
    for name in ("cuda", "cuda-portable"):
        with live(*ONE_GPU, "--encoder", name) as server:
            info = server.get("/info").json()
            assert info["backend"] == "cuda"
            wait_for_log(server, info["backend_choice"])
            if name == "cuda-portable":
                assert info["backend_choice"] == (
                    "the portable CUDA kernels were asked for; cublaslt matrix products, LayerNorm separate, "
                    "a text's last bits may depend on its batch"
                )
            vectors.append(np.array(server.post("/embed", {"inputs": texts}).json(), np.float32))
    assert (vectors[0] * vectors[1]).sum(axis=1).min() > 0.9999


def test_a_killed_engine_comes_back_on_the_gpu() -> None:
    with live(*ONE_GPU) as server:
        before = server.post("/embed", {"inputs": "the same text"}).json()
        server.kill_engine()
        # Each of several HTTP processes learns of it in its own time.
        until(lambda: server.post("/embed", {"inputs": "the same text"}).status_code == 200, what="a response")
        assert server.post("/embed", {"inputs": "the same text"}).json() == before


def test_requests_of_all_adapters_at_once(tmp_path: Path) -> None:
    jina, backend = flash(tmp_path), byte_level(VOCABULARY)
    cases = [(f"text {n}" + " of some length" * (n % 4), task) for n in range(20) for task in (None, *TASKS)]
    with live(str(tmp_path), "--device", "cuda:0") as server:

        def vector(text: str, task: str | None) -> list[float]:
            fields = {"input": text} | ({} if task is None else {"task": task})
            found: list[float] = server.post("/v1/embeddings", fields).json()["data"][0]["embedding"]
            return found

        with ThreadPoolExecutor(32) as pool:
            together = np.array(list(pool.map(lambda case: vector(*case), cases)), np.float32)
        single = np.array([vector(*case) for case in cases[:18]], np.float32)
        info = server.get("/info").json()
    for (text, task), got in zip(cases, together, strict=True):
        pooled = jina.hidden(np.array(backend.encode(INSTRUCTIONS.get(task or "", "") + text).ids), task).mean(0)
        assert got @ (pooled / np.linalg.norm(pooled)) >= 0.9999
    assert info["backend"] == "cuda"
    if "hopper" in info["backend_choice"]:
        np.testing.assert_array_equal(together[:18], single)


@pytest.fixture
def several_gpus() -> int:
    """The number of GPUs. Skips the test without at least two."""
    gpus = len(devices("cuda"))
    if gpus < 2:
        pytest.skip(f"{gpus} GPU(s); wants two")
    return gpus


def test_every_gpu_has_an_engine_and_all_give_the_same_bits(several_gpus: int) -> None:
    texts = [f"text {number}: {'embeddings of many lengths, ' * (number % 40)}" for number in range(64)]
    with live(*MODEL) as server, ThreadPoolExecutor(8) as pool:
        assert len(server.engine_pids) == several_gpus
        responses = list(pool.map(lambda _: server.post("/embed", {"inputs": texts}).json(), range(64 * several_gpus)))
        assert all(response == responses[0] for response in responses)
        metrics = server.metrics()
        batches = [metrics[f'embert_batches_total{{engine="{engine}"}}'] for engine in range(several_gpus)]
        assert min(batches) > 0, f"an idle GPU: {batches}"
