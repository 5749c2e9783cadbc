// Rows whose LayerNorm is left to whoever reads them (../EPILOGUES.md).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace embert {

// A LayerNorm that rows still have to go through. Like all vectors of a model in FP32: rounded to FP16, gamma alone
// would cost more than all matrices do (docs/encoder.md).
struct Norm {
  const float* gamma = nullptr;  // [columns]; null: none
  const float* beta = nullptr;   // [columns]
};

// Rows of a matrix. With `sums` they are not normalised yet, as they are or times their LayerNorm's gamma: for each row
// and each group of 128 columns there are `parts` (1, 2, 4 or 8) sums of elements (x) and of their squares (y), in the
// order of the columns.
struct Rows {
  const void* data = nullptr;
  const float2* sums = nullptr;
  int parts = 1;
};

constexpr int kSumColumns = 128;      // of a group
constexpr int kMaxSumColumns = 1024;  // of a row: eight groups, four lanes each, are a warp

// Rows that stand off zero by more than so many of their deviations are better not taken as Σr², from which μ² goes
// again: at 30 it costs σ some 900 roundings of FP32, 5e-5, a quarter of one of FP16. MiniLM's stay below 0.1.
constexpr float kMostOffset = 30.0f;

// Room for the sums of `rows` rows: one part a group, or up to eight where rows are few.
inline size_t sums_bytes(int rows, int columns) {
  return (size_t(rows) * ((columns + kSumColumns - 1) / kSumColumns) + (1 << 18)) * sizeof(float2);
}

}  // namespace embert
