// The activations of the feed-forward layer, on the device: of one element, and of two at once in FP16.
#pragma once

#include <cstdint>

#include "common/numeric.cuh"
#include "common/types.h"

namespace embert {

__device__ __forceinline__ float tanh_approximate(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Exact: x·Φ(x) through erf, from h = x/2; 32 instructions. For FP32.
__device__ __forceinline__ float gelu_erf_exact(float h) {
  return h * (1.0f + erff(h * 1.41421356237309505f));
}

// The forms below take x/2, which saves an instruction an element where x comes out of a multiply-add.
//
// x·Φ(x) = h + h·tanh(h·p(h²)) with h = x/2 and p fitted to erf's curve (within 2.5e-5); tanh.approx adds at most
// 2.4e-4·|x|. p's leading coefficient is negative. From |x| = 10 on the multiply-add holds its factor at 0 (.sat, at
// no cost), so that p stays positive and tanh at ±1. After rounding to FP16 this is as exact as erff, at a fifth of its
// cost.
__device__ __forceinline__ float gelu_erf_fitted(float h) {
  const float h2 = h * h;
  float slope;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(slope) : "f"(-0.01125467648f), "f"(h2), "f"(0.2960546168f));
  return fmaf(h, tanh_approximate(h * fmaf(slope, h2, 1.5950131728f)), h);
}

// GELU's tanh form (hidden_act gelu_new, gelu_pytorch_tanh): h + h·tanh(√(2/π)(x + 0.044715x³)), h = x/2.
__device__ __forceinline__ float gelu_tanh_argument(float h) {
  return h * fmaf(0.2854192651f, h * h, 1.5957691216f);
}

// x / (1 + e^-x), with two special functions. Below x = −88 the quotient is 0.
__device__ __forceinline__ float silu_approximate(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
  return __fdividef(x, 1.0f + power);
}

// The factor of x before `activate`.
__host__ __device__ constexpr float activation_factor(Activation activation) {
  return activation == Activation::kGeluErf || activation == Activation::kGeluTanh ? 0.5f : 1.0f;
}

// activation(x) from activation_factor · x. kExact: libm's functions instead of tanh.approx, for FP32 storage.
template <Activation kActivation, bool kExact>
__device__ __forceinline__ float activate(float scaled) {
  if constexpr (kActivation == Activation::kGeluErf) {
    return kExact ? gelu_erf_exact(scaled) : gelu_erf_fitted(scaled);
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    const float argument = gelu_tanh_argument(scaled);
    return fmaf(scaled, kExact ? tanhf(argument) : tanh_approximate(argument), scaled);
  } else if constexpr (kActivation == Activation::kRelu) {
    return fmaxf(scaled, 0.0f);
  } else if constexpr (kActivation == Activation::kSilu) {
    return kExact ? scaled / (1.0f + expf(-scaled)) : silu_approximate(scaled);
  } else {
    return scaled;
  }
}

// Activations of two elements at once in FP16, before rows are quantized to int8 (EPILOGUES.md).
//
// They return a quarter of the activation, which keeps every step in FP16's range; the rows' scales include the factor
// 4.

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
