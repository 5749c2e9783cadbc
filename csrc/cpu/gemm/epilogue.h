// The epilogue of a GEMM: a residual, an activation, a gate.
#pragma once

#include <cstddef>

#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace embert::cpu::EMBERT_ISA {

// x → x · Φ(x) with the share Φ(x) of a normal distribution below x; within 3 ulp near 0 and above it.
//
// Φ(-a) = t · exp(-a² / 2) · Q(t) with t = 1 / (1 + 0.32 a). Q is the polynomial of degree 9 whose largest relative
// error over 0 ≤ a ≤ 13 is least: 1.3e-8.
template <int kCount>
inline void gelu(Floats (&x)[kCount]) {
  const Floats one = broadcast(1.0f);
  Floats t[kCount], q[kCount], powers[kCount];
  for (int i = 0; i < kCount; ++i) {
    const Floats a = absolute(x[i]);
    t[i] = one / fma(a, broadcast(0.32f), one);
    powers[i] = a * a * broadcast(-0.5f);
    q[i] = broadcast(-0.0155996275f);
  }
  for (const float coefficient : {0.0667020356f, -0.0819652925f, -0.0169105157f, 0.0552409529f, 0.0261969736f,
                                  0.0982150881f, 0.112586784f, 0.127882226f, 0.127651369f}) {
    for (int i = 0; i < kCount; ++i) q[i] = fma(q[i], t[i], broadcast(coefficient));
  }
  exp(powers);
  for (int i = 0; i < kCount; ++i) {
    const Floats below = t[i] * q[i] * powers[i];
    x[i] *= where_less(x[i], zero(), below, one - below);
  }
}

// x → x / (1 + e⁻ᵘ), with the exponential of a number that is not positive: it cannot overflow.
template <int kCount>
inline void times_sigmoid(Floats (&x)[kCount], const Floats (&u)[kCount]) {
  const Floats one = broadcast(1.0f);
  Floats powers[kCount];
  for (int i = 0; i < kCount; ++i) powers[i] = zero() - absolute(u[i]);
  exp(powers);
  for (int i = 0; i < kCount; ++i) x[i] *= where_less(u[i], zero(), powers[i], one) / (one + powers[i]);
}

template <int kCount>
inline void activate(Floats (&x)[kCount], Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return gelu(x);
    case Activation::kGeluTanh: {  // x · (1 + tanh u) / 2 is x · sigmoid(2u)
      Floats u[kCount];
      for (int i = 0; i < kCount; ++i) {
        const Floats cubic = x[i] * x[i] * broadcast(0.044715f);
        u[i] = fma(cubic, x[i], x[i]) * broadcast(2 * 0.7978845608f);
      }
      return times_sigmoid(x, u);
    }
    case Activation::kRelu:
      for (Floats& value : x)
        value = where_less(value, zero(), zero(), value);  // not maximum: of NaN and 0 it would be 0
      return;
    case Activation::kSilu:
      return times_sigmoid(x, x);
    case Activation::kNone:
      return;
  }
}

// Writes up to kVectors registers of columns of kRows rows of y from `sums`, which include the bias: `offset` is the
// offset of the first one in y, `stride` the distance of its rows, and `count` how many columns are written.
template <int kRows, int kVectors>
inline void store_epilogue(const Floats (&sums)[kRows][kVectors], const Epilogue& epilogue, float* y,
                           std::ptrdiff_t offset, std::ptrdiff_t stride, int count) {
  constexpr int kTogether = kVectors == 2 && kRows % 2 == 0 ? 2 : 1;  // rows: four registers share constants
  for (int first = 0; first < kRows; first += kTogether) {
    Floats values[kTogether * kVectors];
    const auto each = [&](const auto& function) {
      for (int i = 0; i < kTogether * kVectors; ++i) {
        const int left = count - i % kVectors * kLanes;
        const std::ptrdiff_t position = offset + (first + i / kVectors) * stride + i % kVectors * kLanes;
        if (left > 0) function(values[i], position, left);
      }
    };
    for (int i = 0; i < kTogether * kVectors; ++i) values[i] = sums[first + i / kVectors][i % kVectors];
    if (epilogue.residual) {
      each([&](Floats& value, std::ptrdiff_t at, int left) { value += load(epilogue.residual + at, left); });
    }
    activate(values, epilogue.activation);
    if (epilogue.gate)
      each([&](Floats& value, std::ptrdiff_t at, int left) { value *= load(epilogue.gate + at, left); });
    each([&](const Floats& value, std::ptrdiff_t at, int left) { store(y + at, value, left); });
  }
}

}  // namespace embert::cpu::EMBERT_ISA
