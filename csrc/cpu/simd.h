// One register of floats, and the functions of it that kernels need, for the instruction set that a file is compiled
// for. Kernels are written once: CMakeLists.txt compiles them for each instruction set, in a namespace of its name.
//
// What follows uses the compiler's vectors, with operators for each lane. Instructions that these do not name are in
// one header for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
#define EMBERT_ISA avx512
#define EMBERT_REGISTER_BYTES 64
#elif defined(__AVX2__)
#define EMBERT_ISA avx2
#define EMBERT_REGISTER_BYTES 32
#elif defined(__ARM_FEATURE_DOTPROD)
#define EMBERT_ISA neon_dot
#define EMBERT_REGISTER_BYTES 16
#elif defined(__aarch64__)
#define EMBERT_ISA neon
#define EMBERT_REGISTER_BYTES 16
#else
#error "simd.h needs AVX2, AVX-512 or NEON"
#endif

namespace embert::cpu::EMBERT_ISA {

using Floats = float __attribute__((vector_size(EMBERT_REGISTER_BYTES)));
using Ints = std::int32_t __attribute__((vector_size(EMBERT_REGISTER_BYTES)));

constexpr int kLanes = EMBERT_REGISTER_BYTES / 4;
using Lanes = std::make_integer_sequence<int, kLanes>;

inline Floats zero() {
  return Floats{};
}
inline Floats broadcast(float x) {
  return x - zero();  // keeps the sign of 0
}
inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline void store(float* to, Floats x) {
  std::memcpy(to, &x, sizeof x);
}
// Lanes `lane` of a, or `lane - kLanes` of b.
template <int... lane>
inline Floats shuffle(Floats a, Floats b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, lane...);
#else
  return __builtin_shuffle(a, b, Ints{lane...});
#endif
}

}  // namespace embert::cpu::EMBERT_ISA

#if defined(__AVX512F__)
#include "cpu/simd_avx512.h"
#elif defined(__AVX2__)
#include "cpu/simd_avx2.h"
#else
#include "cpu/simd_neon.h"
#endif

namespace embert::cpu::EMBERT_ISA {

inline Floats absolute(Floats x) {
  return Floats(Ints(x) & 0x7fffffff);
}
inline Floats as_floats(Ints x) {
  return __builtin_convertvector(x, Floats);
}
template <typename Integer>
inline Ints load_integers(const Integer* from) {
  Ints x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Floats where_less(Floats a, Floats b, Floats then, Floats otherwise) {
  return a < b ? then : otherwise;
}

#if !defined(__AVX512F__)  // which has instructions for these
template <int... lane>
inline Floats where_first(int count, Floats then, Floats otherwise, std::integer_sequence<int, lane...>) {
  return Ints{lane...} < count ? then : otherwise;
}
inline Floats where_first(int count, Floats then, Floats otherwise) {
  return count >= kLanes ? then : where_first(count, then, otherwise, Lanes());
}
inline void store(float* to, Floats x, int count) {
  if (count >= kLanes) return store(to, x);
  float lanes[kLanes];  // AVX2's vmaskmovps takes many cycles on AMD's CPUs
  store(lanes, x);
  for (int lane = 0; lane < count; ++lane) to[lane] = lanes[lane];
}
// x · 2ⁿ; n is an integer.
inline Floats times_power_of_two(Floats x, Floats n) {
  return x * Floats((__builtin_convertvector(n, Ints) + 127) << 23);
}
#endif

// The lane at distance `kStride` of each lane: a power of two below kLanes.
template <int kStride, int... lane>
inline Floats exchange(Floats x, std::integer_sequence<int, lane...>) {
  return shuffle<(lane ^ kStride)...>(x, x);
}
template <int kStride>
inline Floats exchange(Floats x) {
  return exchange<kStride>(x, Lanes());
}

// Exchanges blocks of kStride rows and columns across the diagonal: columns `kStride` on of a, and the others of b.
template <int kStride, int... lane>
inline void exchange_blocks(Floats& a, Floats& b, std::integer_sequence<int, lane...>) {
  const Floats first = shuffle<(lane & kStride ? kLanes + lane - kStride : lane)...>(a, b);
  b = shuffle<(lane & kStride ? kLanes + lane : lane + kStride)...>(a, b);
  a = first;
}
template <int kStride = 1>
inline void transpose(Floats (&rows)[kLanes]) {
  if constexpr (kStride < kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      if ((i & kStride) == 0) exchange_blocks<kStride>(rows[i], rows[i + kStride], Lanes());
    }
    transpose<2 * kStride>(rows);
  }
}
// Up to kLanes rows of as many columns → columns, with zeros past the last row.
inline void transpose_tile(const float* from, std::ptrdiff_t stride, int valid_rows, float* to,
                           std::ptrdiff_t to_stride) {
  Floats rows[kLanes];
  for (int i = 0; i < kLanes; ++i) rows[i] = i < valid_rows ? load(from + i * stride) : zero();
  transpose(rows);
  for (int i = 0; i < kLanes; ++i) store(to + i * to_stride, rows[i]);
}

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
