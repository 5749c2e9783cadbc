// Registers of AVX2 with FMA, for simd.h. Eight floats, 16 registers.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace embert::cpu::avx2 {

// 6 rows of 2 registers are 12 sums; with 2 registers of b and one of a, 15 of the 16 are in use. A step reads 2 · 32
// and 6 · 4 bytes for 12 products, which take 6 cycles.
constexpr int kTileRows = 6;
constexpr int kTileVectors = 2;

inline Ints first_lanes(int count) {
  return Ints(_mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
}

inline Floats load(const float* from, int count) {
  return count >= kLanes ? load(from) : _mm256_maskload_ps(from, __m256i(first_lanes(count)));
}

inline Floats fma(Floats a, Floats b, Floats c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline Floats maximum(Floats a, Floats b) {
  return _mm256_max_ps(a, b);
}
inline Floats round(Floats x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline float sum(Floats x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest(Floats x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline bool any_nan(Floats a, Floats b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)) != 0;
}

inline Ints load_ints(const std::int32_t* from, int count) {
  return Ints(_mm256_maskload_epi32(from, __m256i(first_lanes(count))));
}
inline Floats gather(const float* from, Ints indices, int count) {
  return _mm256_mask_i32gather_ps(zero(), from, __m256i(indices), Floats(first_lanes(count)), sizeof(float));
}

// --- int8: inputs and weights are widened to 16 bits. vpmaddubsw, which multiplies bytes, saturates. ---

using Input = std::int16_t;
using Weight = std::int16_t;
constexpr int kInputZero = 0;

inline void store_inputs(Input* to, Floats x) {
  const __m256i integers = _mm256_cvtps_epi32(x);
  const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
}

// sum + a · b of two adjacent columns each. With intrinsics GCC 12 moves products ahead of their sums, and then 6 of
// the 12 sums of a tile are in memory: twice the time.
inline Ints add_dot(Ints sum, Ints a, Ints b) {
  Ints product;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(a), "x"(b));
  return sum;
}

}  // namespace embert::cpu::avx2
