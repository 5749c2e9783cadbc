// Shared code of the two embedding kernels: reads a row of a table, and stores an embedded row before its LayerNorm.
#pragma once

#include "ops/embedding.h"
#include "ops/warp_row.cuh"

namespace embert {

// The tables are weights, which no kernel writes.
template <typename T, int kPacks>
__device__ __forceinline__ void load_table_row(Pack<T> (&packs)[kPacks], const T* row, int lane, int hidden) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (WarpRow<T, kPacks>::holds(p, lane, hidden)) packs[p] = load_pack(row + (p * 32 + lane) * Pack<T>::kSize);
  }
}

// Stores an embedded row before its LayerNorm, unchanged or times gamma. Its statistics go into the part of the first
// group (norm.h); those of the other groups are 0.
template <typename T, int kPacks>
__device__ __forceinline__ void store_unnormalized(WarpRow<T, kPacks>& values, const EmbeddingTables& tables, T* y,
                                                   float2* sums, int row, int lane, int hidden) {
  const float2 total = values.sums();
  if (tables.prescaled_rows) values.multiply(tables.norm.gamma, lane, hidden);
  values.store_into(y + size_t(row) * hidden, lane, hidden);
  const int groups = (hidden + kStatColumns - 1) / kStatColumns;
  for (int group = lane; group < groups; group += 32)
    sums[size_t(row) * groups + group] = group == 0 ? total : float2{0.0f, 0.0f};
}

}  // namespace embert
