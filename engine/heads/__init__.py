"""Heads: what follows an encoder's last layer, and the files of sentence-transformers that describe it."""
