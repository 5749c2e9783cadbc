"""The CUDA encoder's kernels one by one: each beside the hardware's limit, each GEMM beside cuBLASLt and CUTLASS."""
