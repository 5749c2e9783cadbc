// Sixteen floats in a register of AVX-512, and the functions of them that layers need.
//
// Only files that are compiled for AVX-512 include this: csrc/cpu/CMakeLists.txt names them.
#pragma once

#include <immintrin.h>

namespace embert::cpu {

using Floats = __m512;

constexpr int kLanes = 16;

// Of the first `count` lanes, 0 to 16 or more.
inline __mmask16 first_lanes(int count) {
  return count >= kLanes ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
}

// eˣ with an error of at most 1 ulp (0.90 measured over steps of 1e-4); 0 below -87.3, and x must be below 88.
//
// x = n · ln 2 + r with |r| ≤ ln 2 / 2, and eʳ is its Taylor polynomial of degree 7: the next term is 5e-9 of it.
inline Floats exp(Floats x) {
  const Floats lowest = _mm512_set1_ps(-87.3f);
  const __mmask16 tiny = _mm512_cmp_ps_mask(x, lowest, _CMP_LT_OQ);
  x = _mm512_max_ps(lowest, x);  // NaN stays: the second operand wins
  const Floats n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  // ln 2 in two parts, of which the first has few digits: its product with n is exact.
  Floats r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  Floats y = _mm512_set1_ps(1.0f / 5040);
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 720));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 120));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 24));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 6));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.5f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
  return _mm512_mask_mov_ps(_mm512_scalef_ps(y, n), tiny, _mm512_setzero_ps());
}

}  // namespace embert::cpu
