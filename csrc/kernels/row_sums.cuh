// From the sums that a row's producer left to what its LayerNorm needs, in one order of additions whatever the parts'
// number: parts of a group as a balanced tree, then groups g and g + 4, then neighbours, then pairs.
#pragma once

#include "norm.h"

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

// The same of one row by one thread.
__device__ __forceinline__ float2 row_scale(const Rows& rows, int row, int width, float epsilon) {
  const int groups = (width + kSumColumns - 1) / kSumColumns;
  const float2* const sums = rows.sums + size_t(row) * groups * rows.parts;
  float2 of_groups[8];
#pragma unroll
  for (int g = 0; g < 8; ++g) {
    of_groups[g] =
        g < groups ? group_sum(sums + g * rows.parts, rows.parts, width - g * kSumColumns) : float2{0.0f, 0.0f};
  }
  const float2 low = (of_groups[0] + of_groups[4]) + (of_groups[1] + of_groups[5]);
  const float2 high = (of_groups[2] + of_groups[6]) + (of_groups[3] + of_groups[7]);
  return row_scale(low + high, 1.0f / width, epsilon, 1.0f);
}

}  // namespace embert
