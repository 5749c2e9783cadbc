"""The CUDA encoder: which models it runs (shapes.py), their weights and heads, and batches through the extension."""
