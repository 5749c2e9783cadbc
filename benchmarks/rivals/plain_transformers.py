"""plain_fastapi without sentence-transformers: FastAPI around transformers, padded batches, mean pooling.

MODEL=/path/to/model uvicorn benchmarks.rivals.plain_transformers:app
"""

from __future__ import annotations

import os

import torch
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import AutoModel, AutoTokenizer

app = FastAPI()
device, dtype = ("cuda", torch.float16) if torch.cuda.is_available() else ("cpu", torch.float32)
tokenizer = AutoTokenizer.from_pretrained(os.environ["MODEL"])
model = AutoModel.from_pretrained(os.environ["MODEL"], dtype=dtype).to(device).eval()


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
    batch = tokenizer(request.inputs, padding=True, truncation=True, max_length=512, return_tensors="pt").to(device)
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state.float()
        mask = batch["attention_mask"].unsqueeze(-1)
        vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
    return EmbedResponse(embeddings=vectors.tolist())
