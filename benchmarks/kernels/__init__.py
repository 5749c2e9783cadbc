"""The CUDA encoder's kernels one by one: each next to the hardware's limit, each GEMM next to cuBLASLt and CUTLASS."""
