// The online softmax over scores in mma.cuh's order.
#pragma once

#include <cfloat>

namespace embert {

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
