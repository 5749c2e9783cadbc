"""FastAPI around sentence-transformers, the service that most people write first: nothing tuned, nothing slowed.

Without sentence-transformers around transformers: padded batches, mean pooling.

MODEL=/path/to/model uvicorn benchmarks.rivals.plain_fastapi:app
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from fastapi import FastAPI
from pydantic import BaseModel

app = FastAPI()
folder = os.environ["MODEL"]

if find_spec("sentence_transformers"):
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(folder)
    if torch.cuda.is_available():
        encoder = encoder.half()

    def encode(texts: list[str]) -> list[list[float]]:
        """Vectors of length 1."""
        vectors: list[list[float]] = encoder.encode(texts, normalize_embeddings=True).tolist()
        return vectors

else:
    from transformers import AutoModel, AutoTokenizer

    device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=dtype).to(device).eval()

    def encode(texts: list[str]) -> list[list[float]]:
        """Vectors of length 1."""
        batch = tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt").to(device)
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state.float()
            mask = batch["attention_mask"].unsqueeze(-1)
            rows: list[list[float]] = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).tolist()
        return rows


class EmbedRequest(BaseModel):
    """Texts in."""

    inputs: list[str]


class EmbedResponse(BaseModel):
    """Vectors out."""

    embeddings: list[list[float]]


@app.get("/health")
def health() -> dict[str, str]:
    """Respond once the model is loaded."""
    return {"status": "ok"}


@app.post("/embed")
def embed(request: EmbedRequest) -> EmbedResponse:
    """Encode, on one of FastAPI's threads for plain functions."""
    return EmbedResponse(embeddings=encode(request.inputs))
