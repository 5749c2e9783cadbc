// Scores of a tile of queries and keys: their initial values, and the online softmax.
#pragma once

#include <cfloat>

#include "ops/attention_work.h"

namespace embert {

// Initializes the scores of a warp's 16 rows and 8 · kTiles keys. Q·Kᵀ is added to them, so the addition is free, and
// the maximum includes it. `from` is the position of the lane's first row and column. `at` gives element i of tile n,
// in mma.cuh's order.
//
// A score depends only on key − query. So rows g + 8 of a tile need what rows g had of the previous tile, and a step of
// 64 keys takes 18 loads and 14 moves a lane. The lanes of a load read 14 adjacent floats, one wavefront of the L1
// cache (docs/experiments.md has the alternatives).
//
// The loads are plain ones: the compiler moves loads through __ldg behind the next barrier, just before their use.
template <int kTiles, typename At>
__device__ __forceinline__ void init_scores(const float* from, const At& at) {
  float before[2] = {from[-8], from[-7]};
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      at(n, i + 2) = before[i];
      at(n, i) = before[i] = from[n * 8 + i];
    }
}
// The lane's `from` for rows from `query` on and key 0.
__device__ __forceinline__ const float* first_score(const RelativeScores& relative, int head, int query, int lane) {
  return relative.scores + (2 * head + 1) * relative.reach - query + 2 * (lane % 4) - lane / 4;
}

// 2^x, flushed to 0 below -126.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A step for the lane's row lane / 4 + 8 · half: replaces its scores by exponentials, and updates its maximum and sum.
// Returns the factor for the sums of earlier steps: 0 at the first step. kMayBeEmpty: all scores so far may be -inf,
// and the step then adds nothing.
template <bool kMayBeEmpty = false, int kTiles>
__device__ __forceinline__ float online_softmax(float (&s)[kTiles][4], int half, float& maximum, float& sum,
                                                float scale_log2) {
  float highest = maximum;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) highest = fmaxf(highest, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
  highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
  highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
  if constexpr (kMayBeEmpty) highest = fmaxf(highest, -FLT_MAX);  // -inf minus -inf is NaN
  const float correction = exp2_approximate((maximum - highest) * scale_log2);
  maximum = highest;
  const float shift = highest * scale_log2;
  float row_sum = 0.0f;
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      s[n][i] = exp2_approximate(fmaf(s[n][i], scale_log2, -shift));
      row_sum += s[n][i];
    }
  sum = fmaf(sum, correction, row_sum);
  return correction;
}
template <int kTiles>
__device__ __forceinline__ void rescale(float (&out)[kTiles][4], int half, float correction) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    out[n][2 * half] *= correction;
    out[n][2 * half + 1] *= correction;
  }
}

}  // namespace embert
