// Registers of AVX-512, for simd.h. Sixteen floats, 32 registers.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace embert::cpu::avx512 {

// 6 rows of 4 registers are 24 sums. With 4 registers of b and one of a, 29 of the 32 are in use. A step reads 4 · 64
// and 6 · 4 bytes for 24 products, which take 24 cycles where one of 512 bits starts in each (Zen 4), and 12 where two
// do.
constexpr int kTileRows = 6;
constexpr int kTileVectors = 4;

inline __mmask16 first_lanes(int count) {
  return count >= kLanes ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
}

inline Floats load(const float* from, int count) {
  return _mm512_maskz_loadu_ps(first_lanes(count), from);
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

inline Floats where_first(int count, Floats then, Floats otherwise) {
  return _mm512_mask_mov_ps(otherwise, first_lanes(count), then);
}

inline Ints load_ints(const std::int32_t* from, int count) {
  return Ints(_mm512_maskz_loadu_epi32(first_lanes(count), from));
}
inline Floats gather(const float* from, Ints indices, int count) {
  return _mm512_mask_i32gather_ps(zero(), first_lanes(count), __m512i(indices), from, sizeof(float));
}

// --- int8: inputs are unsigned, with 0 at 128, because vpdpbusd multiplies unsigned by signed bytes ---

using Input = std::uint8_t;
using Weight = std::int8_t;
constexpr int kInputZero = 128;

inline void store_inputs(Input* to, Floats x) {
  const __m512i integers = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(kInputZero));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(integers));
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
