// Gated feed-forward: y = activation(gate)·value, from adjacent rows of W (EPILOGUES.md).
#pragma once

#include "common/numeric.cuh"
#include "gemm/epilogue/finish.cuh"

namespace embert::sm90 {

// The factor of a gate before its activation. The value has no factor: its constants and its row's scale are
// multiplied by 1 / kGateFactor, a power of two.
constexpr float kGateFactor = 0.5f;

// activation(x) from h = x/2. SiLU is x·σ(x) = h + h·tanh(h), because σ(x) = ½(1 + tanh(x/2)); tanh.approx adds at most
// 2.4e-4·|x|, as in GELU.
template <Activation kActivation>
__device__ __forceinline__ float gate_activation(float h) {
  if constexpr (kActivation == Activation::kSilu) {
    return fmaf(h, tanh_approximate(h), h);
  } else if constexpr (kActivation == Activation::kRelu) {
    return fmaxf(h + h, 0.0f);
  } else {
    static_assert(activation_factor(kActivation) == kGateFactor, "an activation of x/2");
    return activate<kActivation, false>(h);
  }
}

// An element of y from a gate and its value. `constants`: their columns' constants, the gate's times kGateFactor
// (fold.cuh); `scale`: the row's scale and shift times kGateFactor.
template <Activation kActivation, bool kPrescaledRows>
__device__ __forceinline__ float gated(float gate, float value, ColumnPair<false, kPrescaledRows> constants,
                                       float2 scale) {
  const float2 by_value = {scale.x * (1.0f / kGateFactor), scale.y * (1.0f / kGateFactor)};
  if constexpr (kPrescaledRows) {
    gate = fmaf(gate, scale.x, fmaf(constants.x, scale.y, constants.y));
    value = fmaf(value, by_value.x, fmaf(constants.z, by_value.y, constants.w));
  } else {
    gate = fmaf(gate, scale.x, constants.x);
    value = fmaf(value, by_value.x, constants.y);
  }
  return gate_activation<kActivation>(gate) * value;
}

// In two adjacent m16n8 tiles a lane has one element of y each, `first` and `second`, in column lane % 4 of four. Two
// lanes exchange elements, so that each can store two adjacent ones: the even lane gets both of the first tile, the
// odd lane both of the second. They begin at column gated_column of the eight.
template <typename T>
__device__ __forceinline__ uint32_t pack_with_lane_neighbor(float first, float second, int lane) {
  const uint32_t own = pack_two<T>(first, second), other = __shfl_xor_sync(~0u, own, 1);
  return __byte_perm(own, other, lane % 2 == 0 ? 0x5410 : 0x3276);
}
__device__ __forceinline__ int gated_column(int lane) {
  return 4 * (lane % 2) + (lane & 2);
}

}  // namespace embert::sm90
