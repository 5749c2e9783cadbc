"""The CPU encoder beside its rivals: embeddings (`python -m benchmarks.encoder.cpu`) and reranking (`….cpu.rerank`)."""
