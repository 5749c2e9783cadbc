// Registers of AVX-512, for simd.h. Sixteen floats, 32 registers.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace embert::cpu::avx512 {

using Floats = __m512;
using Ints = __m512i;

constexpr int kLanes = 16;

// 6 rows of 4 registers are 24 sums. With 4 registers of b and one of a, 29 of the 32 are in use. A step reads 4 · 64
// and 6 · 4 bytes for 24 products, which take 24 cycles where one of 512 bits starts in each (Zen 4), and 12 where two
// do.
constexpr int kTileRows = 6;
constexpr int kTileVectors = 4;

inline __mmask16 first_lanes(int count) {
  return count >= kLanes ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
}

inline Floats zero() {
  return _mm512_setzero_ps();
}
inline Floats broadcast(float x) {
  return _mm512_set1_ps(x);
}
inline Floats load(const float* from) {
  return _mm512_loadu_ps(from);
}
inline Floats load(const float* from, int count) {
  return _mm512_maskz_loadu_ps(first_lanes(count), from);
}
inline void store(float* to, Floats x) {
  _mm512_storeu_ps(to, x);
}
inline void store(float* to, Floats x, int count) {
  _mm512_mask_storeu_ps(to, first_lanes(count), x);
}

inline Floats fma(Floats a, Floats b, Floats c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline Floats maximum(Floats a, Floats b) {
  return _mm512_max_ps(a, b);
}
inline Floats absolute(Floats x) {
  return _mm512_abs_ps(x);
}
inline Floats round(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Floats times_power_of_two(Floats x, Floats n) {
  return _mm512_scalef_ps(x, n);
}
inline float sum(Floats x) {
  return _mm512_reduce_add_ps(x);
}
inline float largest(Floats x) {
  return _mm512_reduce_max_ps(x);
}
inline bool any_nan(Floats a, Floats b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q) != 0;
}

inline Floats where_less(Floats a, Floats b, Floats then, Floats otherwise) {
  return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), then);
}
inline Floats where_first(int count, Floats then, Floats otherwise) {
  return _mm512_mask_mov_ps(otherwise, first_lanes(count), then);
}

inline Ints load_ints(const std::int32_t* from, int count) {
  return _mm512_maskz_loadu_epi32(first_lanes(count), from);
}
inline Ints broadcast_int(std::int32_t x) {
  return _mm512_set1_epi32(x);
}
inline Ints add(Ints a, Ints b) {
  return _mm512_add_epi32(a, b);
}
inline Floats gather(const float* from, Ints indices, int count) {
  return _mm512_mask_i32gather_ps(zero(), first_lanes(count), indices, from, sizeof(float));
}

inline void transpose_tile(const float* from, std::ptrdiff_t stride, int valid_rows, float* to,
                           std::ptrdiff_t to_stride) {
  Floats rows[kLanes], swapped[kLanes];
  for (int i = 0; i < kLanes; ++i) rows[i] = i < valid_rows ? load(from + i * stride) : zero();
  for (int i = 0; i < kLanes; i += 2) {
    swapped[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    swapped[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4) {  // rows[i + j]: column j of each quarter, of rows i … i + 3
    for (int j = 0; j < 2; ++j) {
      const __m512d a = _mm512_castps_pd(swapped[i + j]), b = _mm512_castps_pd(swapped[i + j + 2]);
      rows[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      rows[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
  for (int j = 0; j < 4; ++j) {
    const Floats a = _mm512_shuffle_f32x4(rows[j], rows[j + 4], 0x88),
                 b = _mm512_shuffle_f32x4(rows[j], rows[j + 4], 0xdd);
    const Floats c = _mm512_shuffle_f32x4(rows[j + 8], rows[j + 12], 0x88);
    const Floats d = _mm512_shuffle_f32x4(rows[j + 8], rows[j + 12], 0xdd);
    store(to + j * to_stride, _mm512_shuffle_f32x4(a, c, 0x88));
    store(to + (j + 8) * to_stride, _mm512_shuffle_f32x4(a, c, 0xdd));
    store(to + (j + 4) * to_stride, _mm512_shuffle_f32x4(b, d, 0x88));
    store(to + (j + 12) * to_stride, _mm512_shuffle_f32x4(b, d, 0xdd));
  }
}

// --- int8: inputs are unsigned, with 0 at 128, because vpdpbusd multiplies unsigned by signed bytes ---

using Input = std::uint8_t;
using Weight = std::int8_t;
constexpr int kInputZero = 128;

// The lane at distance `kStride` of each lane: a power of two below kLanes.
template <int kStride>
inline Floats exchange(Floats x) {
  if constexpr (kStride == 1) return _mm512_permute_ps(x, 0b10110001);
  if constexpr (kStride == 2) return _mm512_permute_ps(x, 0b01001110);
  if constexpr (kStride == 4) return _mm512_shuffle_f32x4(x, x, 0b10110001);
  if constexpr (kStride == 8) return _mm512_shuffle_f32x4(x, x, 0b01001110);
}

inline Floats as_floats(Ints x) {
  return _mm512_cvtepi32_ps(x);
}

inline void store_inputs(Input* to, Floats x) {
  const Ints integers = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(kInputZero));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(integers));
}

inline Ints load_weights(const Weight* from) {
  return _mm512_load_si512(from);
}

#ifdef __AVX512VNNI__
// sum + a · b of four adjacent columns each. The intrinsic makes GCC 12 copy every sum and load b for every product:
// twice the time.
inline Ints add_dot(Ints sum, Ints a, Ints b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
#endif

}  // namespace embert::cpu::avx512
