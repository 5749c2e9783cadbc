// The order of a matrix's rows, where products want another than the model's own (gemm/gemm.h).
#pragma once

namespace embert {

// Row i of a rotary model's query or key is this row of the model's own: of each head, elements j and j + turned/2,
// which are turned together, become neighbours. Scores are sums over a head's columns, so they do not change.
constexpr int rope_row(int i, int head_size, int rotary_dim) {
  const int column = i % head_size;
  if (column >= rotary_dim) return i;
  return i - column + column / 2 + column % 2 * (rotary_dim / 2);
}

// Where row j of a gate (part 0) or of what it multiplies (part 1) goes.
constexpr int gated_row(int j, int part) {
  return 2 * j + part;
}

}  // namespace embert
