"""int8 matrix products, defined in numpy: what every encoder computes with `--dtype int8`, to the integer.

    y = (q_x · q_wᵀ) · scale_of_row · scale_of_channel + bias

A product's input x is rotated: its columns are multiplied by a Hadamard matrix H. So are the weights: H is orthogonal,
hence (x·H)·(w·H)ᵀ = x·wᵀ. A rotation spreads a large column over many, and even steps then fit all of them. The CPU
encoder rotates 128 neighboring columns together (`rows`), the CUDA encoder 32, and it balances columns with their
weights before (`blocks`).
Sums are exact in INT32; scales, bias, attention, residuals and norms are those of float32.

Only the products of layers are int8. The tables, a projection of embeddings and the heads are not.
"""

MIN_ACCURACY = 0.995  # the least worst cosine to the default dtype that an int8 encoder may have, by default
