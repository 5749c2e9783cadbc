"""Encoders on the CPU in eight bits and in float32: embert and ONNX Runtime, each in a process of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rivals.cpu_encoders import BATCH_TEXTS, MAX_LENGTH, EmbertEncoder, Floats, Rival
from benchmarks.rivals.eight_bits.onnx_graph import write_fused, write_int8
from embert.engine.tokenization.encoded import TokenizeOptions

__all__ = ["RIVALS"]


class EmbertInt8(EmbertEncoder):
    """embert from token ids, int8: one packed batch."""

    def load(self, folder: Path, dtype: str) -> None:  # noqa: ARG002  # each rival has a dtype of its own
        """See Rival."""
        super().load(folder, "int8")


class OnnxRuntime(Rival):
    """ONNX Runtime from token ids: a fused graph in float32, batches of 32 sorted by length, mean pooling in numpy."""

    int8 = False

    def load(self, folder: Path, dtype: str) -> None:  # noqa: ARG002  # each rival has a dtype of its own
        """See Rival."""
        import onnxruntime

        from embert import engine
        from embert.engine.host import usable_cpus

        self.tokenizer = engine.Tokenizer(engine.load_model(str(folder)))
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "fused.onnx")
            write_fused(folder, path)
            if self.int8:
                write_int8(path, path := Path(scratch, "int8.onnx"))
            options = onnxruntime.SessionOptions()
            if usable_cpus() < (os.cpu_count() or 1):  # by default it pins a thread to each core of the machine
                options.intra_op_num_threads = usable_cpus()
            self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def prepare(self, texts: Sequence[str]) -> Any:
        """See Rival."""
        encoded = self.tokenizer.encode(texts, TokenizeOptions(limit=MAX_LENGTH))
        sequences = np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])
        order = np.argsort([-len(each) for each in sequences], kind="stable")
        batches = []
        for first in range(0, len(order), BATCH_TEXTS):
            numbers = order[first : first + BATCH_TEXTS]
            longest = len(sequences[numbers[0]])
            ids, mask = (np.zeros((len(numbers), longest), np.int32) for _ in range(2))
            for row, number in enumerate(numbers):
                ids[row, : len(sequences[number])] = sequences[number]
                mask[row, : len(sequences[number])] = 1
            batches.append((numbers, {"input_ids": ids, "token_types": np.zeros_like(ids), "attention_mask": mask}))
        return batches

    def run(self, prepared: Any) -> Floats:
        """See Rival."""
        vectors = []
        for _, batch in prepared:
            (hidden,) = self.session.run(None, batch)
            mask = batch["attention_mask"][:, None].astype(np.float32)
            rows = (mask @ hidden)[:, 0]
            vectors.append(rows / np.linalg.norm(rows, axis=1, keepdims=True))
        every = np.concatenate(vectors)
        in_order: Floats = np.empty_like(every)
        in_order[np.concatenate([numbers for numbers, _ in prepared])] = every
        return in_order


class OnnxRuntimeInt8(OnnxRuntime):
    """The same graph quantized by ONNX Runtime's quantize_dynamic."""

    int8 = True


# embert in int8 is the first, its own float32 the second.
RIVALS: dict[str, type[Rival]] = {
    "embert int8": EmbertInt8,
    "embert float32": EmbertEncoder,
    "ONNX Runtime float32": OnnxRuntime,
    "ONNX Runtime int8": OnnxRuntimeInt8,
}
