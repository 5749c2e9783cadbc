"""The CPU encoder next to its rivals: embeddings (`python -m benchmarks.encoder.cpu`), reranking (`….cpu.rerank`)."""
