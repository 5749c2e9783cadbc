"""Checkpoints' files that describe heads: masked language models, bge-m3, late interaction. Imports no numpy."""
