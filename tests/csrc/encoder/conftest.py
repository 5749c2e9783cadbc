from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from embert import engine
from embert.engine.encoders.cuda.encoder import CudaEncoder
from tests.csrc.encoder.random_models import MAX_TOKENS, random_bert


@pytest.fixture(scope="package")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_bert(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="package")
def encoder(base: Path) -> Iterator[CudaEncoder]:
    made = CudaEncoder(engine.load_model(str(base)), max_batch_tokens=MAX_TOKENS)
    yield made
    made.close()
