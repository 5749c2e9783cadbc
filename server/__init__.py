"""HTTP, queue, batching, processes, metrics, command line. Knows nothing of CUDA or torch."""
