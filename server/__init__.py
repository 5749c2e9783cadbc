"""HTTP, queue, batching, processes, metrics, command line. Knows nothing of CUDA or torch."""

__all__ = ["__version__"]

__version__ = "0.1.0"
