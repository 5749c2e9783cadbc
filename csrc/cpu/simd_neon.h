// Registers of NEON, for simd.h. Four floats, 32 registers. The namespace for CPUs with the dot product differs in
// int8.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace embert::cpu::EMBERT_ISA {

// 6 rows of 4 registers are 24 sums. With 4 registers of b and one of a, 29 of the 32 are in use. A step reads 4 · 16
// and 6 · 4 bytes for 24 products, which take 12 cycles where two start in each (Neoverse N1), and 6 where four do.
constexpr int kTileRows = 6;
constexpr int kTileVectors = 4;

inline Floats load(const float* from, int count) {
  if (count >= kLanes) return load(from);
  float lanes[kLanes] = {};
  for (int lane = 0; lane < count; ++lane) lanes[lane] = from[lane];
  return load(lanes);
}

inline Floats fma(Floats a, Floats b, Floats c) {
  return vfmaq_f32(c, a, b);
}
// The second operand if one is NaN, as on x86: vmaxq would return NaN.
inline Floats maximum(Floats a, Floats b) {
  return vbslq_f32(vcgtq_f32(a, b), a, b);
}
inline Floats round(Floats x) {
  return vrndnq_f32(x);
}
inline float sum(Floats x) {
  return vaddvq_f32(x);
}
inline float largest(Floats x) {
  return vmaxvq_f32(x);
}
inline bool any_nan(Floats a, Floats b) {
  return vminvq_u32(vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b))) == 0;
}

inline Ints load_ints(const std::int32_t* from, int count) {
  if (count >= kLanes) return vld1q_s32(from);
  std::int32_t lanes[kLanes] = {};
  for (int lane = 0; lane < count; ++lane) lanes[lane] = from[lane];
  return vld1q_s32(lanes);
}
inline Floats gather(const float* from, Ints indices, int count) {
  std::int32_t index[kLanes];
  vst1q_s32(index, int32x4_t(indices));
  float lanes[kLanes] = {};
  for (int lane = 0; lane < kLanes && lane < count; ++lane) lanes[lane] = from[index[lane]];
  return load(lanes);
}

// --- int8 ---

constexpr int kInputZero = 0;

#ifdef __ARM_FEATURE_DOTPROD

using Input = std::int8_t;
using Weight = std::int8_t;

inline void store_inputs(Input* to, Floats x) {
  const int16x4_t narrow = vqmovn_s32(vcvtnq_s32_f32(x));
  const int8x8_t bytes = vqmovn_s16(vcombine_s16(narrow, narrow));
  std::memcpy(to, &bytes, kLanes);
}

// sum + a · b of four adjacent columns each.
inline Ints add_dot(Ints sum, Ints a, Ints b) {
  return vdotq_s32(sum, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
}

#else  // inputs and weights are widened to 16 bits

using Input = std::int16_t;
using Weight = std::int16_t;

inline void store_inputs(Input* to, Floats x) {
  vst1_s16(to, vqmovn_s32(vcvtnq_s32_f32(x)));
}

// sum + a · b of two adjacent columns each.
inline Ints add_dot(Ints sum, Ints a, Ints b) {
  const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
  const Ints low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
  return vaddq_s32(sum, vpaddq_s32(low, high));
}

#endif

}  // namespace embert::cpu::EMBERT_ISA
