// The order of a matrix's rows, where GEMMs need another one than the checkpoint's (gemm/gemm.h).
#pragma once

namespace embert {

// The row of the checkpoint's query or key that becomes row i of ours: of each head, elements j and j + rotary_dim/2,
// which RoPE rotates together, become adjacent. Scores are sums over a head's columns, so they do not change.
constexpr int rope_row(int i, int head_size, int rotary_dim) {
  const int column = i % head_size;
  if (column >= rotary_dim) return i;
  return i - column + column / 2 + column % 2 * (rotary_dim / 2);
}

// The destination of row j of a gate (part 0) or of its value (part 1).
constexpr int gated_row(int j, int part) {
  return 2 * j + part;
}

}  // namespace embert
