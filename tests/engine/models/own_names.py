"""transformers writes some families under the tensor names of older code; its classes' own names are read as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import transformers
from safetensors.torch import load_file, save_file

from embert import engine
from embert.engine.tasks import Task
from tests.engine.conftest import random_sequences, small_tokenizer
from tests.engine.model_cases import MODEL_CASES, build

__all__ = ["check_own_names"]

# A head → the pooling that asks for it, and the task that reads it.
READS = {
    "Model": (None, Task.TOKENS),
    "ForMaskedLM": ("splade", Task.SPARSE),
    "ForSequenceClassification": (None, Task.CLASSIFY),
}


def check_own_names(folder: Path, family: str, head: str) -> None:
    """The same bits, whichever names a random checkpoint of a family has."""
    build(folder, family, head=head, modules=False)
    small_tokenizer(64).save(str(folder / "tokenizer.json"))
    theirs: Any = getattr(transformers, MODEL_CASES[family][0] + head).from_pretrained(folder)
    own = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    path = folder / "model.safetensors"
    assert not {name for name in load_file(path) if ".0." in name} & set(own)  # of the first layer, none is the same
    pooling, task = READS[head]
    sequences = random_sequences([3, 40], 60)
    answers = []
    for _ in range(2):
        encoder = engine.load_encoder(engine.load_model(str(folder), pooling=pooling), device="cpu")
        answers.append(encoder.wait(encoder.submit(engine.pack(sequences).wanting(task)))[task])
        save_file(own, path, {"format": "pt"})
    older, newer = answers
    assert older.values.size
    np.testing.assert_array_equal(older.values, newer.values)
    if task == Task.SPARSE:
        assert older.indices is not None
        assert newer.indices is not None
        np.testing.assert_array_equal(older.indices, newer.indices)
