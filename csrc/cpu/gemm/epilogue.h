// The epilogue of a GEMM: a residual, an activation, a gate.
#pragma once

#include <cstddef>

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace embert::cpu::EMBERT_ISA {

// Φ(x), the share of a normal distribution below x; within 3 ulp near 0 and above it.
//
// Φ(-a) = t · exp(-a² / 2) · Q(t) with t = 1 / (1 + 0.32 a). Q is the polynomial of degree 9 whose largest relative
// error over 0 ≤ a ≤ 13 is least: 1.3e-8.
inline Floats normal_cdf(Floats x) {
  constexpr float kCoefficients[] = {-0.0155996275f, 0.0667020356f, -0.0819652925f, -0.0169105157f, 0.0552409529f,
                                     0.0261969736f,  0.0982150881f, 0.112586784f,   0.127882226f,   0.127651369f};
  const Floats a = absolute(x), one = broadcast(1.0f);
  const Floats t = one / fma(a, broadcast(0.32f), one);
  Floats q = broadcast(kCoefficients[0]);
  for (int i = 1; i < 10; ++i) q = fma(q, t, broadcast(kCoefficients[i]));
  const Floats below = t * q * exp(a * a * broadcast(-0.5f));
  return where_less(x, zero(), below, one - below);
}

// 1 / (1 + e⁻ˣ), with the exponential of a number that is not positive: it cannot overflow.
inline Floats sigmoid(Floats x) {
  const Floats one = broadcast(1.0f), power = exp(zero() - absolute(x));
  return where_less(x, zero(), power, one) / (one + power);
}

inline Floats activate(Floats x, Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return x * normal_cdf(x);
    case Activation::kGeluTanh: {  // x · (1 + tanh u) / 2 is x · sigmoid(2u)
      const Floats cubic = x * x * broadcast(0.044715f);
      return x * sigmoid(fma(cubic, x, x) * broadcast(2 * 0.7978845608f));
    }
    case Activation::kRelu:
      return where_less(x, zero(), zero(), x);  // not maximum: of NaN and 0 it would be 0
    case Activation::kSilu:
      return x * sigmoid(x);
    case Activation::kNone:
      break;
  }
  return x;
}

// Writes `count` columns of y from `sums`, which include the bias: `offset` is the offset of the first one in y.
template <int kVectors>
inline void store_epilogue(const Floats (&sums)[kVectors], const Epilogue& epilogue, float* y, std::ptrdiff_t offset,
                           int count) {
  for (int v = 0; v < kVectors; ++v) {
    const int left = count - v * kLanes;
    if (left <= 0) return;
    const std::ptrdiff_t position = offset + v * kLanes;
    Floats value = sums[v];
    if (epilogue.residual) value += load(epilogue.residual + position, left);
    value = activate(value, epilogue.activation);
    if (epilogue.gate) value *= load(epilogue.gate + position, left);
    store(y + position, value, left);
  }
}

}  // namespace embert::cpu::EMBERT_ISA
