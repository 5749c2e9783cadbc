"""ColBERT's queries, expanded by tokens that nothing attends to, on a GPU: compared with transformers' mask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from embert import engine
from embert.engine.tasks import Task
from tests.csrc.encoder.random_models import agrees, make_encoder
from tests.engine.heads.late_interaction import expanded_sequences, masked_vectors, pylate

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "gemm"), [("float32", "auto"), ("float16", "auto"), ("float16", "cublaslt")])
@pytest.mark.parametrize("case", ["bert", "modernbert", "lfm2", "lfm2, biases", "mistral, both ways"])
def test_vectors_are_those_of_an_attention_mask(tmp_path: Path, case: str, dtype: str, gemm: str) -> None:
    """Alone or in a batch, in texts of up to 32 tokens and in longer ones, next to texts that are not expanded."""
    if dtype == "float32" and case == "mistral, both ways":
        pytest.skip("has kernels for 16 bits only")
    wide = {"head_dim": 288} if case == "mistral, both ways" else None
    folder, sequences = pylate(tmp_path / "model", case=case, shape=wide, query_length=100), expanded_sequences()
    encoder = make_encoder(engine.load_model(str(folder)), dtype=dtype, gemm=gemm)
    batch = engine.pack(sequences).with_tasks(Task.MULTI)
    rows = encoder.wait(encoder.submit(batch))[Task.MULTI]
    for number, expected in enumerate(masked_vectors(folder, sequences)):
        ours = rows.slice(number, number + 1).values
        assert (ours * expected).sum(1).min() >= (0.99999 if dtype == "float32" else 0.9995)
        alone = encoder.wait(encoder.submit(batch.take(np.array([number]))))[Task.MULTI].values
        assert agrees(encoder, alone, ours)
    encoder.close()


def test_scores_of_expanded_queries(tmp_path: Path) -> None:
    folder = str(pylate(tmp_path / "model"))
    documents = ["it is a cat!", "", "no dog, no cat", "a b c d e f g h"]
    scores = []
    for device in ("cpu", "cuda:0"):
        with engine.Engine.load(folder, device=device) as loaded:
            scores.append({rank.index: rank.score for rank in loaded.rerank("a cat", documents)})
    for index, score in scores[0].items():
        assert scores[1][index] == pytest.approx(score, rel=5e-3)
