// In place of csrc/ops/activation_pair.cuh where kernels run on the host: the functions that the device
// approximates.
#pragma once

#include <cmath>

#include "common/numeric.cuh"
#include "ops/activation.h"

namespace embert {

constexpr float kPairFactor = 0.25f;

constexpr float pair_factor(Activation activation) {
  return activation == Activation::kGeluErf || activation == Activation::kGeluTanh ? 0.5f * kPairFactor
         : activation == Activation::kRelu                                         ? kPairFactor
                                                                                   : 1.0f;
}

template <Activation kActivation>
uint32_t activate_pair(uint32_t bits) {
  const float2 two = unpack_two<half_t>(bits);
  const auto of = [](float v) {
    const double x = 8.0 * v;
    if (kActivation == Activation::kGeluErf) return float(v * (1.0 + std::erf(x * 0.70710678118654752)));
    if (kActivation == Activation::kGeluTanh)
      return float(v * (1.0 + std::tanh(0.79788456080286536 * (x + 0.044715 * x * x * x))));
    return kActivation == Activation::kRelu ? std::fmax(v, 0.0f) : v;
  };
  return pack_two<half_t>(of(two.x), of(two.y));
}

}  // namespace embert
