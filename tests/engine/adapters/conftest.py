from __future__ import annotations

from typing import Any

import pytest

from embert import engine
from embert.engine.encoders.cuda.encoder import CudaEncoder
from embert.engine.model import Model
from tests.engine.adapters.on_gpu import TOKENS, Make
from tests.engine.conftest import Install
from tests.engine.stand_in_gpu import StandInGpu
from tests.oracles.jina_v3 import Jina, flash


@pytest.fixture(scope="module")
def jina(tmp_path_factory: pytest.TempPathFactory) -> Jina:
    return flash(tmp_path_factory.mktemp("jina"))


@pytest.fixture(scope="module")
def model(jina: Jina) -> Model:
    return engine.load_model(str(jina.folder))


@pytest.fixture
def make(install: Install) -> Make:
    """An encoder on a stand-in for the extension."""

    def made(model: Model, *, gpu: dict[str, Any] | None = None, **options: Any) -> tuple[CudaEncoder, StandInGpu]:
        stand_in = install(model, **(gpu or {}))
        encoder = CudaEncoder(model, **{"max_batch_tokens": TOKENS, **options})
        for each in stand_in.encoders:
            each.batches.clear()  # of the self test
        return encoder, stand_in

    return made
