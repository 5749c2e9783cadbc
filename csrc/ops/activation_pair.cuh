// Activations of two elements at once in FP16, before rows are quantized to int8 (EPILOGUES.md).
//
// They return a quarter of the activation, which keeps every step in FP16's range; the rows' scales include the factor
// 4.
#pragma once

#include <cstdint>

#include "common/numeric.cuh"
#include "ops/activation.h"

namespace embert {

constexpr float kPairFactor = 0.25f;  // of an activation, in rows that are quantized to int8

// The factor of x before `activate_pair`.
__host__ __device__ constexpr float pair_factor(Activation activation) {
  return activation == Activation::kGeluErf || activation == Activation::kGeluTanh ? 0.5f * kPairFactor
         : activation == Activation::kRelu                                         ? kPairFactor
                                                                                   : 1.0f;
}

__device__ __forceinline__ __half2 tanh_approximate(__half2 x) {
  uint32_t y;
  asm("tanh.approx.f16x2 %0, %1;" : "=r"(y) : "r"(as_bits(x)));
  return as_half2(y);
}

// activation(x) / 4 from pair_factor · x = v, both elements of it.
//
// GELU is v + v·tanh(v·p(w)) with w = min(v², 1), where x is 8 and tanh is 1 to all digits. p is that of
// gelu_erf_fitted for w, or the tanh form's own.
template <Activation kActivation>
__device__ __forceinline__ uint32_t activate_pair(uint32_t bits) {
  const __half2 v = as_half2(bits);
  if constexpr (kActivation == Activation::kGeluErf) {
    const __half2 w = __hmul2_sat(v, v);
    const __half2 slope = __hfma2(w, __float2half2_rn(-11.5247888f), __float2half2_rn(18.9474955f));
    const __half2 p = __hfma2(slope, w, __float2half2_rn(6.3800527f));
    return as_bits(__hfma2(v, tanh_approximate(__hmul2_rn(v, p)), v));
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    const __half2 w = __hmul2_sat(v, v);
    const __half2 p = __hfma2(w, __float2half2_rn(18.2668330f), __float2half2_rn(6.3830765f));
    return as_bits(__hfma2(v, tanh_approximate(__hmul2_rn(v, p)), v));
  } else if constexpr (kActivation == Activation::kRelu) {
    return as_bits(__hmax2_nan(v, __float2half2_rn(0.0f)));
  } else {
    return bits;
  }
}

}  // namespace embert
