"""FastAPI around sentence-transformers, the service that most people write first: nothing tuned, nothing slowed.

MODEL=/path/to/model uvicorn benchmarks.rivals.plain_fastapi:app
"""

from __future__ import annotations

import os

import torch
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

app = FastAPI()
model = SentenceTransformer(os.environ["MODEL"])
if torch.cuda.is_available():
    model = model.half()


class EmbedRequest(BaseModel):
    """Texts in."""

    inputs: list[str]


class EmbedResponse(BaseModel):
    """Vectors out."""

    embeddings: list[list[float]]


@app.get("/health")
def health() -> dict[str, str]:
    """Answer once the model is loaded."""
    return {"status": "ok"}


@app.post("/embed")
def embed(request: EmbedRequest) -> EmbedResponse:
    """Encode, on one of FastAPI's threads for plain functions."""
    vectors = model.encode(request.inputs, normalize_embeddings=True)
    return EmbedResponse(embeddings=vectors.tolist())
