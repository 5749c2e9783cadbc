// One register of floats, and the functions of it that kernels need, for the instruction set that a file is compiled
// for. Kernels are written once: CMakeLists.txt compiles them for each instruction set, in a namespace of its name.
#pragma once

#if defined(__AVX512F__)
#define EMBERT_ISA avx512
#include "cpu/simd_avx512.h"
#elif defined(__AVX2__)
#define EMBERT_ISA avx2
#include "cpu/simd_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#define EMBERT_ISA neon_dot
#include "cpu/simd_neon.h"
#elif defined(__aarch64__)
#define EMBERT_ISA neon
#include "cpu/simd_neon.h"
#else
#error "simd.h needs AVX2, AVX-512 or NEON"
#endif

namespace embert::cpu::EMBERT_ISA {

// eˣ of each register, with an error of at most 1 ulp (0.90 measured over steps of 1e-4); 0 below -87.3, and x must be
// below 88.
//
// x = n · ln 2 + r with |r| ≤ ln 2 / 2, and eʳ is its Taylor polynomial of degree 7: the next term is 5e-9 of it. Each
// step waits for the one before, so the steps of several registers are interleaved.
template <int kCount>
inline void exp(Floats (&x)[kCount]) {
  const Floats lowest = broadcast(-87.3f);
  Floats n[kCount], r[kCount], y[kCount];
  for (int i = 0; i < kCount; ++i) {
    const Floats bounded = maximum(lowest, x[i]);  // NaN stays: the second operand wins
    n[i] = round(bounded * broadcast(1.44269504f));
    // ln 2 in two parts, of which the first has few digits: its product with n is exact.
    r[i] = fma(n[i], broadcast(2.12194440e-4f), fma(n[i], broadcast(-0.693359375f), bounded));
    y[i] = broadcast(1.0f / 5040);
  }
  for (const float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    for (int i = 0; i < kCount; ++i) y[i] = fma(y[i], r[i], broadcast(coefficient));
  }
  for (int i = 0; i < kCount; ++i) x[i] = where_less(x[i], lowest, zero(), times_power_of_two(y[i], n[i]));
}

}  // namespace embert::cpu::EMBERT_ISA
