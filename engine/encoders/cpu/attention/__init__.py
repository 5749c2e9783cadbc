"""Attention of packed sequences, and how it knows positions: biases by distance, rotations, windows."""
