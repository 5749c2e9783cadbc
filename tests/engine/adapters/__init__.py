"""Adapters: low-rank weights that a sequence may add to the model's, on a CPU and on a stand-in for a GPU."""
