// The order in which the sums of a row are added, and the scale and shift of its LayerNorm. Every reader and every
// writer of row statistics adds in this order, so a row's bits do not depend on the tiles that wrote it and read it:
//
//   1. A piece of 16 columns: the columns of each of four lanes (of an m16n8 pair), then lanes 2 apart, then lanes 1
//      apart.
//   2. The 8 pieces of a group of 128 columns, as a balanced tree (`tree`). A part of a group is a subtree: 1, 2, 4 or
//      all 8 pieces.
//   3. The 8 groups of a row: g and g + 4, then adjacent ones, then the two pairs.
//
// Missing columns and groups count as 0, which changes no bits.
//
// The writers are in gemm/epilogue/row_stats.cuh; the embedding writes a row's sums as its first group's. The readers
// differ in how lanes share a row's groups: one thread has them all, or eight lanes one each (here), or four lanes two
// each, or two lanes four each (gemm/epilogue/row_stats.cuh).
#pragma once

#include "ops/norm.h"

namespace embert {

__device__ __forceinline__ float2 operator+(float2 a, float2 b) {
  return {a.x + b.x, a.y + b.y};
}

// Adjacent ones first, then pairs of them, and so on.
__device__ __forceinline__ float2 tree(const float2 (&terms)[4]) {
  return (terms[0] + terms[1]) + (terms[2] + terms[3]);
}
__device__ __forceinline__ float2 tree(const float2 (&terms)[8]) {
  return ((terms[0] + terms[1]) + (terms[2] + terms[3])) + ((terms[4] + terms[5]) + (terms[6] + terms[7]));
}

// The value of the lane whose number differs in the bit `step`.
__device__ __forceinline__ float2 shuffle_xor_pair(float2 value, int step) {
  return {__shfl_xor_sync(~0u, value.x, step), __shfl_xor_sync(~0u, value.y, step)};
}

// The sum of a group of `columns` columns from its `count` parts: `tree` as a binary counter, in a loop, for readers
// whose code has to stay small. A row's last group may be narrower than 128 columns; parts past its end are not
// written.
__device__ __forceinline__ float2 group_sum(const float2* parts, int count, int columns) {
  float2 two = {}, four = {}, sum = parts[0];  // two, four: sums of parts whose adjacent parts come later
#pragma unroll 1
  for (int part = 0; part + 1 < count; part += 2) {
    const int width = kStatColumns / count;
    sum = (part * width < columns ? parts[part] : float2{0.0f, 0.0f}) +
          ((part + 1) * width < columns ? parts[part + 1] : float2{0.0f, 0.0f});
    if ((part & 2) == 0) {
      two = sum;
    } else {
      sum = two + sum;
      if ((part & 4) == 0)
        four = sum;
      else
        sum = four + sum;
    }
  }
  return sum;
}

// (1/σ, −μ/σ) of a row of 1 / `inverse_width` elements, both times `factor`. `mean_scale`: `inverse_width`, or 0 for
// RMSNorm, whose μ is 0.
__device__ __forceinline__ float2 row_scale(float2 sums, float inverse_width, float mean_scale, float epsilon,
                                            float factor) {
  const float mean = sums.x * mean_scale;
  const float variance = fmaxf(fmaf(-mean, mean, sums.y * inverse_width), 0.0f);
  const float scale = factor * rsqrtf(variance + epsilon);
  return {scale, -mean * scale};
}

// The same of a row for one thread, where the row's sums have one part a group.
__device__ __forceinline__ float2 row_scale(const RowView& rows, int row, int width, float epsilon) {
  const int groups = (width + kStatColumns - 1) / kStatColumns;
  const float2* const from = rows.stats + size_t(row) * groups;
  float2 terms[8];
#pragma unroll
  for (int group = 0; group < 8; ++group) terms[group] = group < groups ? from[group] : float2{0.0f, 0.0f};
  const float2 low = (terms[0] + terms[4]) + (terms[1] + terms[5]),
               high = (terms[2] + terms[6]) + (terms[3] + terms[7]);
  return row_scale(low + high, 1.0f / width, 1.0f / width, epsilon, 1.0f);
}

// The same of a row for eight adjacent lanes with a group each. All of them get it, and all loads are in flight
// before the first is used. `group`: 0 … 7, the lane's place among them.
__device__ __forceinline__ float2 row_scale(const RowView& rows, int row, int width, float epsilon, int group) {
  const int groups = (width + kStatColumns - 1) / kStatColumns, split_columns = kStatColumns / rows.splits;
  const float2* const from = rows.stats + (size_t(row) * groups + group) * rows.splits;
  const auto four = [&](int begin) {  // a row's last group may be narrower; parts past its end are not written
    float2 parts[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int part = begin + i;
      const bool written = part < rows.splits && group * kStatColumns + part * split_columns < width;
      parts[i] = written ? from[part] : float2{0.0f, 0.0f};
    }
    return tree(parts);
  };
  float2 sum = four(0);
  if (rows.splits > 4) sum = sum + four(4);
  for (const int step : {4, 1, 2})
    sum = sum + float2{__shfl_xor_sync(~0u, sum.x, step), __shfl_xor_sync(~0u, sum.y, step)};
  return row_scale(sum, 1.0f / width, 1.0f / width, epsilon, 1.0f);
}

}  // namespace embert
