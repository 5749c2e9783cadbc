// Registers of AVX2 with FMA, for simd.h. Eight floats, 16 registers.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace embert::cpu::avx2 {

using Floats = __m256;
using Ints = __m256i;

constexpr int kLanes = 8;

// 6 rows of 2 registers are 12 sums; with 2 registers of b and one of a, 15 of the 16 are in use. A step reads 2 · 32
// and 6 · 4 bytes for 12 products, which take 6 cycles.
constexpr int kTileRows = 6;
constexpr int kTileVectors = 2;

inline Ints first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline Floats zero() {
  return _mm256_setzero_ps();
}
inline Floats broadcast(float x) {
  return _mm256_set1_ps(x);
}
inline Floats load(const float* from) {
  return _mm256_loadu_ps(from);
}
inline Floats load(const float* from, int count) {
  return count >= kLanes ? load(from) : _mm256_maskload_ps(from, first_lanes(count));
}
inline void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x);
}
inline void store(float* to, Floats x, int count) {
  if (count >= kLanes) return store(to, x);
  float lanes[kLanes];  // vmaskmovps takes many cycles on AMD's CPUs
  store(lanes, x);
  for (int lane = 0; lane < count; ++lane) to[lane] = lanes[lane];
}

inline Floats fma(Floats a, Floats b, Floats c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline Floats maximum(Floats a, Floats b) {
  return _mm256_max_ps(a, b);
}
inline Floats absolute(Floats x) {
  return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}
inline Floats round(Floats x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Floats times_power_of_two(Floats x, Floats n) {
  const Ints exponents = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(exponents));
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

inline Floats where_less(Floats a, Floats b, Floats then, Floats otherwise) {
  return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline Floats where_first(int count, Floats then, Floats otherwise) {
  if (count >= kLanes) return then;
  return _mm256_blendv_ps(otherwise, then, _mm256_castsi256_ps(first_lanes(count)));
}

inline Ints load_ints(const std::int32_t* from, int count) {
  return _mm256_maskload_epi32(from, first_lanes(count));
}
inline Ints broadcast_int(std::int32_t x) {
  return _mm256_set1_epi32(x);
}
inline Ints add(Ints a, Ints b) {
  return _mm256_add_epi32(a, b);
}
inline Floats gather(const float* from, Ints indices, int count) {
  return _mm256_mask_i32gather_ps(zero(), from, indices, _mm256_castsi256_ps(first_lanes(count)), sizeof(float));
}

inline void transpose_tile(const float* from, std::ptrdiff_t stride, int valid_rows, float* to,
                           std::ptrdiff_t to_stride) {
  Floats rows[kLanes], swapped[kLanes];
  for (int i = 0; i < kLanes; ++i) rows[i] = i < valid_rows ? load(from + i * stride) : zero();
  for (int i = 0; i < kLanes; i += 2) {
    swapped[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    swapped[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4) {  // rows[i + j]: column j of each half, of rows i … i + 3
    for (int j = 0; j < 2; ++j) {
      const __m256d a = _mm256_castps_pd(swapped[i + j]), b = _mm256_castps_pd(swapped[i + j + 2]);
      rows[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
      rows[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
    }
  }
  for (int j = 0; j < 4; ++j) {
    store(to + j * to_stride, _mm256_permute2f128_ps(rows[j], rows[j + 4], 0x20));
    store(to + (j + 4) * to_stride, _mm256_permute2f128_ps(rows[j], rows[j + 4], 0x31));
  }
}

// --- int8: inputs and weights are widened to 16 bits. vpmaddubsw, which multiplies bytes, saturates. ---

using Input = std::int16_t;
using Weight = std::int16_t;
constexpr int kInputZero = 0;

// The lane at distance `kStride` of each lane: a power of two below kLanes.
template <int kStride>
inline Floats exchange(Floats x) {
  if constexpr (kStride == 1) return _mm256_permute_ps(x, 0b10110001);
  if constexpr (kStride == 2) return _mm256_permute_ps(x, 0b01001110);
  if constexpr (kStride == 4) return _mm256_permute2f128_ps(x, x, 0x01);
}

inline Floats as_floats(Ints x) {
  return _mm256_cvtepi32_ps(x);
}

inline void store_inputs(Input* to, Floats x) {
  const Ints integers = _mm256_cvtps_epi32(x);
  const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
}

inline Ints load_weights(const Weight* from) {
  return _mm256_load_si256(reinterpret_cast<const Ints*>(from));
}

// sum + a · b of two adjacent columns each. With intrinsics GCC 12 moves products ahead of their sums, and then 6 of
// the 12 sums of a tile are in memory: twice the time.
inline Ints add_dot(Ints sum, Ints a, Ints b) {
  Ints product;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(a), "x"(b));
  return sum;
}

}  // namespace embert::cpu::avx2
