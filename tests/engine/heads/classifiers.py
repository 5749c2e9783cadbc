"""Classification models with random weights, and HuggingFace's logits to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from embert import engine
from tests.engine.conftest import Floats, Ids, random_sequences, small_tokenizer
from tests.oracles.model_cases import build


def build_classifier(folder: Path, case: str = "bert", *, labels: int = 3, vocab_size: int = 99, **config: Any) -> Path:
    """A folder as transformers writes it, with a tokenizer of single characters."""
    names = {"id2label": {i: f"label {i}" for i in range(labels)}, "label2id": {f"label {i}": i for i in range(labels)}}
    build(folder, case, vocab_size=vocab_size, head="ForSequenceClassification", modules=False, **{**names, **config})
    small_tokenizer(99).save(str(folder / "tokenizer.json"))
    return folder


KINDS = ("weight", "bias")


def check_bert_classifier(
    folder: Path,
    save: Callable[[dict[str, torch.Tensor]], None],
    hidden: Callable[[Ids, Ids | None], npt.NDArray[np.float64]],
    columns: int,
    labels: int,
    vocab_size: int,
) -> None:
    """Compares logits of BERT's head, whose random tensors `save` stores, with those of an oracle's `hidden` states."""
    sizes = {"bert.pooler.dense": (columns, columns), "classifier": (labels, columns)}
    shapes = {f"{name}.{kind}": size[: 2 if kind == "weight" else 1] for name, size in sizes.items() for kind in KINDS}
    drawn = torch.Generator().manual_seed(1)
    head = {name: torch.randn(*shape, generator=drawn) * 0.3 for name, shape in shapes.items()}
    save(head)
    sequences, types = random_sequences([9, 40], vocab_size), random_sequences([9, 40], 2, seed=1)
    encoder = engine.load_encoder(engine.load_model(str(folder)), device="cpu")
    logits = encoder.encode(engine.pack(sequences, token_types=types), engine.Task.CLASSIFY)
    exact = {name: tensor.double().numpy() for name, tensor in head.items()}
    for ours, ids, kinds in zip(logits, sequences, types, strict=True):
        pooled = np.tanh(exact["bert.pooler.dense.weight"] @ hidden(ids, kinds)[0] + exact["bert.pooler.dense.bias"])
        np.testing.assert_allclose(ours, exact["classifier.weight"] @ pooled + exact["classifier.bias"], atol=1e-4)


def hugging_face_logits(folder: Path, sequences: Sequence[Ids], token_types: Sequence[Ids] | None = None) -> Floats:
    """transformers' float32 logits, one sequence at a time, so without padding: float32 [n, labels]."""
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for index, ids in enumerate(sequences):
        inputs = {"input_ids": ids} if token_types is None else {"input_ids": ids, "token_type_ids": token_types[index]}
        with torch.inference_mode():
            rows.append(model(**{name: torch.from_numpy(each[None].astype(np.int64)) for name, each in inputs.items()}))
    logits: Floats = np.concatenate([row.logits.numpy() for row in rows])
    return logits
