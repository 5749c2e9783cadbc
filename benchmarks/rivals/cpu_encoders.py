"""embert and its rivals as encoders on the CPU, each in its own process, with its default settings."""

from __future__ import annotations

import dataclasses
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

MAX_LENGTH = 512  # tokens: all that BERT's positions allow, whatever a model's own files say
BATCH_TEXTS = 32  # sentence-transformers' own default
SHORTEST_S = 0.2  # a turn repeats its workload for at least this long


class Rival(ABC):
    """One way to turn a workload into normalized vectors, or into scores."""

    @abstractmethod
    def load(self, folder: Path, dtype: str) -> None:
        """Load the model."""

    @abstractmethod
    def prepare(self, texts: Any) -> Any:
        """Return what `run` takes; this is not timed."""

    @abstractmethod
    def run(self, prepared: Any) -> Floats:
        """Return vectors, float32 [n, width], or scores, float32 [n]; this is timed."""


class Embert(Rival):
    """embert from texts: Engine.embed."""

    def load(self, folder: Path, dtype: str) -> None:
        from embert import engine

        model = dataclasses.replace(engine.load_model(str(folder)), max_input_length=MAX_LENGTH)
        self.engine = engine.Engine.load(model, dtype=dtype, device="cpu")

    def prepare(self, texts: Sequence[str]) -> Any:
        return texts

    def run(self, prepared: Any) -> Floats:
        return self.engine.embed(prepared)


class EmbertEncoder(Embert):
    """embert from token ids: one packed batch."""

    def load(self, folder: Path, dtype: str) -> None:
        from embert import engine

        model = dataclasses.replace(engine.load_model(str(folder)), max_input_length=MAX_LENGTH)
        self.engine = engine.Engine.load(model, dtype=dtype, device="cpu", max_batch_tokens=1 << 20)

    def prepare(self, texts: Sequence[str]) -> Any:
        from embert import engine

        encoded = self.engine.tokenizer.encode(texts)
        return engine.pack(np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1]))

    def run(self, prepared: Any) -> Floats:
        return self.engine.encoder.encode(prepared)


class Transformers(Rival):
    """transformers from token ids: batches in the order given, padded to their longest, sdpa, mean pooling."""

    def load(self, folder: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()

    def prepare(self, texts: Sequence[str]) -> Any:
        return [
            self.tokenizer(
                texts[i : i + BATCH_TEXTS], padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt"
            )
            for i in range(0, len(texts), BATCH_TEXTS)
        ]

    def run(self, prepared: Any) -> Floats:
        import torch

        rows = []
        with torch.inference_mode():
            for batch in prepared:
                hidden = self.model(**batch).last_hidden_state.float()
                mask = batch["attention_mask"].unsqueeze(-1)
                rows.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)))
        vectors: Floats = torch.cat(rows).numpy()
        return vectors


class SentenceTransformers(Rival):
    """sentence-transformers from texts: `encode`, which sorts by length and pads batches of 32."""

    def load(self, folder: Path, dtype: str) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(
            str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
        )
        self.model.max_seq_length = MAX_LENGTH

    def prepare(self, texts: Sequence[str]) -> Any:
        return texts

    def run(self, prepared: Any) -> Floats:
        tensor = self.model.encode(
            list(prepared),
            batch_size=BATCH_TEXTS,
            convert_to_numpy=False,
            convert_to_tensor=True,
            show_progress_bar=False,
        )
        vectors: Floats = tensor.float().numpy()
        return vectors


# embert is the first of each kind.
FROM_TEXTS: dict[str, type[Rival]] = {"embert": Embert, "sentence-transformers": SentenceTransformers}
FROM_IDS: dict[str, type[Rival]] = {"embert (encoder)": EmbertEncoder, "transformers": Transformers}
ENCODERS = {**FROM_TEXTS, **FROM_IDS}


def serve(kind: type[Rival], folder: Path, dtype: str, workloads: Mapping[str, Any], pipe: Connection) -> None:
    """Load the rival, then run a workload whenever its name arrives on `pipe`; None ends.

    The first time, a workload's response is the return value of `run`; later (seconds of a run, CPU seconds of it). The
    last response is the peak memory in bytes.
    """
    rival = kind()
    rival.load(folder, dtype)
    prepared: dict[str, Any] = {}
    pipe.send(None)
    while (workload := pipe.recv()) is not None:
        if workload not in prepared:
            prepared[workload] = rival.prepare(workloads[workload])
            pipe.send(rival.run(prepared[workload]))
            continue
        start, cpu, runs = time.perf_counter(), time.process_time(), 0
        while runs == 0 or time.perf_counter() - start < SHORTEST_S:
            rival.run(prepared[workload])
            runs += 1
        pipe.send(((time.perf_counter() - start) / runs, time.process_time() - cpu))
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
