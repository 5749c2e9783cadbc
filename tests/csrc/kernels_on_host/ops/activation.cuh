// In place of csrc/ops/activation.cuh where kernels run on the host: the functions that the device
// approximates.
#pragma once

#include <cmath>

#include "ops/activation.h"

namespace embert {

constexpr float activation_factor(Activation activation) {
  return activation == Activation::kGeluErf || activation == Activation::kGeluTanh ? 0.5f : 1.0f;
}

template <Activation kActivation, bool kExact>
float activate(float scaled) {
  if constexpr (kActivation == Activation::kGeluErf) return scaled * (1.0f + std::erf(scaled * 1.41421356237309505f));
  const float x = 2.0f * scaled;
  if constexpr (kActivation == Activation::kGeluTanh)
    return scaled * (1.0f + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
  return kActivation == Activation::kRelu ? std::fmax(scaled, 0.0f) : scaled;
}

}  // namespace embert
