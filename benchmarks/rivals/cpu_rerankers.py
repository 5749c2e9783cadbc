"""embert and sentence-transformers' CrossEncoder as rerankers on the CPU: pairs of texts to scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.rivals.cpu_encoders import BATCH_TEXTS, Floats, Rival


class Embert(Rival):
    """embert from texts: Engine.score."""

    def load(self, folder: Path, dtype: str) -> None:
        from embert import engine

        self.engine = engine.Engine.load(str(folder), dtype=dtype, device="cpu")

    def prepare(self, texts: Sequence[tuple[str, str]]) -> Any:
        return texts

    def run(self, prepared: Any) -> Floats:
        return self.engine.score(prepared)


class CrossEncoder(Rival):
    """sentence-transformers from texts: `predict`, which sorts by length and pads batches of 32."""

    def load(self, folder: Path, dtype: str) -> None:
        import torch
        from sentence_transformers import CrossEncoder

        self.model = CrossEncoder(
            str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
        )

    def prepare(self, texts: Sequence[tuple[str, str]]) -> Any:
        return [list(pair) for pair in texts]

    def run(self, prepared: Any) -> Floats:
        scores: Floats = self.model.predict(prepared, batch_size=BATCH_TEXTS, show_progress_bar=False)
        return scores


# embert is the first.
RERANKERS: dict[str, type[Rival]] = {"embert": Embert, "CrossEncoder": CrossEncoder}
