// From the sums that a row's producer left to what its LayerNorm needs, in one order of additions whatever the parts'
// number: parts of a group as a balanced tree, then groups g and g + 4, then neighbours, then pairs.
#pragma once

#include "norm/norm.h"

namespace embert {

__device__ __forceinline__ float2 operator+(float2 a, float2 b) {
  return {a.x + b.x, a.y + b.y};
}

// A group of `columns` columns. Rolled, for readers whose code should stay short: the tree as a binary counter. A row's
// last group may be narrower than 128 columns; parts past the end were never written.
__device__ __forceinline__ float2 group_sum(const float2* parts, int count, int columns) {
  float2 two = {}, four = {}, sum = parts[0];  // two, four: parts whose neighbours are still to come
#pragma unroll 1
  for (int part = 0; part + 1 < count; part += 2) {
    const int width = kSumColumns / count;
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

// (1/σ, −μ/σ) of a row of 1 / `inverse_width` elements, both times `factor`.
__device__ __forceinline__ float2 row_scale(float2 sums, float inverse_width, float epsilon, float factor) {
  const float mean = sums.x * inverse_width;
  const float variance = fmaxf(fmaf(-mean, mean, sums.y * inverse_width), 0.0f);
  const float scale = factor * rsqrtf(variance + epsilon);
  return {scale, -mean * scale};
}

// The same of one row by one thread, where its sums come in one part a group.
__device__ __forceinline__ float2 row_scale(const Rows& rows, int row, int width, float epsilon) {
  const int groups = (width + kSumColumns - 1) / kSumColumns;
  const float2* const from = rows.sums + size_t(row) * groups;
  float2 of[8];
#pragma unroll
  for (int group = 0; group < 8; ++group) of[group] = group < groups ? from[group] : float2{0.0f, 0.0f};
  const float2 low = (of[0] + of[4]) + (of[1] + of[5]), high = (of[2] + of[6]) + (of[3] + of[7]);
  return row_scale(low + high, 1.0f / width, epsilon, 1.0f);
}

// The same of one row by eight neighbouring lanes, a group each; all of them get it, and all loads are on their way
// before the first is used. `of`: 0 … 7, the lane's place among them.
__device__ __forceinline__ float2 row_scale(const Rows& rows, int row, int width, float epsilon, int of) {
  const int groups = (width + kSumColumns - 1) / kSumColumns, part_columns = kSumColumns / rows.parts;
  const float2* const from = rows.sums + (size_t(row) * groups + of) * rows.parts;
  const auto four = [&](int begin) {  // a row's last group may be narrower; parts past the end were never written
    float2 parts[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int part = begin + i;
      const bool written = part < rows.parts && of * kSumColumns + part * part_columns < width;
      parts[i] = written ? from[part] : float2{0.0f, 0.0f};
    }
    return (parts[0] + parts[1]) + (parts[2] + parts[3]);
  };
  float2 sum = four(0);
  if (rows.parts > 4) sum = sum + four(4);
  for (const int step : {4, 1, 2})
    sum = sum + float2{__shfl_xor_sync(~0u, sum.x, step), __shfl_xor_sync(~0u, sum.y, step)};
  return row_scale(sum, 1.0f / width, epsilon, 1.0f);
}

}  // namespace embert
