// The activations of the feed-forward layer.
#pragma once

#include "shapes.h"

namespace embert {

__device__ __forceinline__ float tanh_approximate(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Exact: x·Φ(x) through erf, 32 instructions. For FP32.
__device__ __forceinline__ float gelu_erf_exact(float x) {
  return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
}

// x·Φ(x) with Φ(x) = ½(1 + tanh(u·p(u²))), p fitted to erf's own curve (within 2.5e-5), u = x held to ±5, where Φ is 0
// or 1 to FP16's last bit; tanh.approx adds at most 2.4e-4·|x|. After rounding to FP16 as exact as erff, at a third of
// its price.
__device__ __forceinline__ float gelu_erf_fitted(float x) {
  const float u = fminf(fmaxf(x, -5.0f), 5.0f);
  const float u2 = u * u;
  const float p = fmaf(fmaf(-3.5170864e-4f, u2, 0.0370068271f), u2, 0.7975065864f);
  const float half_x = 0.5f * x;
  return fmaf(half_x, tanh_approximate(u * p), half_x);
}

// GELU's tanh form (hidden_act gelu_new, gelu_pytorch_tanh): ½x(1 + tanh(√(2/π)(x + 0.044715x³))).
__device__ __forceinline__ float gelu_tanh_argument(float x) {
  return 0.7978845608028654f * x * fmaf(0.044715f * x, x, 1.0f);
}

// kExact: libm's functions instead of tanh.approx, for FP32 storage.
template <Activation kActivation, bool kExact>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == Activation::kGeluErf) {
    return kExact ? gelu_erf_exact(x) : gelu_erf_fitted(x);
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    const float t = kExact ? tanhf(gelu_tanh_argument(x)) : tanh_approximate(gelu_tanh_argument(x));
    return 0.5f * x * (1.0f + t);
  } else if constexpr (kActivation == Activation::kRelu) {
    return fmaxf(x, 0.0f);
  } else {
    return x;
  }
}

}  // namespace embert
