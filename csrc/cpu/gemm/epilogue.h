// The epilogue of a GEMM: an activation, then a residual or a gate.
#pragma once

#include <cstddef>

#include "cpu/gemm/linear.h"
#include "cpu/gemm/tile.h"
#include "cpu/simd.h"

namespace embert::cpu {

// Φ(x), the share of a normal distribution below x; within 3 ulp near 0 and above it.
//
// Φ(-a) = t · exp(-a² / 2) · Q(t) with t = 1 / (1 + 0.32 a). Q is the polynomial of degree 9 whose largest relative
// error over 0 ≤ a ≤ 13 is least: 1.3e-8.
inline Floats normal_cdf(Floats x) {
  constexpr float kCoefficients[] = {-0.0155996275f, 0.0667020356f, -0.0819652925f, -0.0169105157f, 0.0552409529f,
                                     0.0261969736f,  0.0982150881f, 0.112586784f,   0.127882226f,   0.127651369f};
  const Floats a = _mm512_abs_ps(x), one = _mm512_set1_ps(1.0f);
  const Floats t = _mm512_div_ps(one, _mm512_fmadd_ps(a, _mm512_set1_ps(0.32f), one));
  Floats q = _mm512_set1_ps(kCoefficients[0]);
  for (int i = 1; i < 10; ++i) q = _mm512_fmadd_ps(q, t, _mm512_set1_ps(kCoefficients[i]));
  const Floats tail = exp(_mm512_mul_ps(_mm512_mul_ps(a, a), _mm512_set1_ps(-0.5f)));
  const Floats below = _mm512_mul_ps(_mm512_mul_ps(t, q), tail);
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(_mm512_sub_ps(one, below), negative, below);
}

// 1 / (1 + e⁻ˣ), with the exponential of a number that is not positive: it cannot overflow.
inline Floats sigmoid(Floats x) {
  const Floats one = _mm512_set1_ps(1.0f);
  const Floats power = exp(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  return _mm512_div_ps(_mm512_mask_mov_ps(one, negative, power), _mm512_add_ps(one, power));
}

inline Floats activate(Floats x, Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return _mm512_mul_ps(x, normal_cdf(x));
    case Activation::kGeluTanh: {  // x · (1 + tanh u) / 2 is x · sigmoid(2u)
      const Floats cubic = _mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f));
      const Floats u = _mm512_mul_ps(_mm512_fmadd_ps(cubic, x, x), _mm512_set1_ps(2 * 0.7978845608f));
      return _mm512_mul_ps(x, sigmoid(u));
    }
    case Activation::kRelu:
      // Not max: of NaN and 0 it would be 0.
      return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), _mm512_setzero_ps());
    case Activation::kSilu:
      return _mm512_mul_ps(x, sigmoid(x));
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
    const __mmask16 mask = first_lanes(count - v * kLanes);
    const std::ptrdiff_t position = offset + v * kLanes;
    Floats value = activate(sums[v], epilogue.activation);
    if (epilogue.residual) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, epilogue.residual + position));
    if (epilogue.gate) value = _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, epilogue.gate + position));
    _mm512_mask_storeu_ps(y + position, mask, value);
  }
}

}  // namespace embert::cpu
