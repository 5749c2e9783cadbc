#include "cpu/products/quantize.h"

#include <cmath>

#include "cpu/registers/floats.h"

namespace embert::cpu {
namespace {

constexpr int kRegisters = kRotated / kLanes;
constexpr float kLevels = 127.0f;

// A butterfly of lanes that lie `kStride` apart: the first of a pair becomes their sum, the second their difference.
template <int kStride>
inline Floats butterfly(Floats x) {
  Floats other;
  if constexpr (kStride == 1) other = _mm512_permute_ps(x, 0b10110001);
  if constexpr (kStride == 2) other = _mm512_permute_ps(x, 0b01001110);
  if constexpr (kStride == 4) other = _mm512_shuffle_f32x4(x, x, 0b10110001);
  if constexpr (kStride == 8) other = _mm512_shuffle_f32x4(x, x, 0b01001110);
  constexpr __mmask16 kSecond = kStride == 1 ? 0xaaaa : kStride == 2 ? 0xcccc : kStride == 4 ? 0xf0f0 : 0xff00;
  return _mm512_mask_sub_ps(_mm512_add_ps(x, other), kSecond, other, x);
}

// A butterfly of registers that lie `stride` apart.
inline void butterfly(Floats (&x)[kRegisters], int stride) {
  for (int i = 0; i < kRegisters; ++i) {
    if (i & stride) continue;
    const Floats first = x[i], second = x[i + stride];
    x[i] = _mm512_add_ps(first, second);
    x[i + stride] = _mm512_sub_ps(first, second);
  }
}

}  // namespace

void quantize(const float* x, int columns, float* rotated, std::uint8_t* integers, float* scale) {
  Floats most = _mm512_setzero_ps();
  __mmask16 wrong = 0;  // lanes with NaN, which a maximum ignores
  for (int column = 0; column < columns; column += kRotated) {
    Floats y[kRegisters];
    for (int i = 0; i < kRegisters; ++i) {
      y[i] = butterfly<1>(_mm512_loadu_ps(x + column + i * kLanes));
      y[i] = butterfly<8>(butterfly<4>(butterfly<2>(y[i])));
    }
    butterfly(y, 1);
    butterfly(y, 2);
    butterfly(y, 4);
    for (int i = 0; i < kRegisters; ++i) {
      _mm512_storeu_ps(rotated + column + i * kLanes, y[i]);
      most = _mm512_max_ps(_mm512_abs_ps(y[i]), most);
      wrong |= _mm512_cmp_ps_mask(y[i], y[i], _CMP_UNORD_Q);
    }
  }
  const float largest = wrong ? __builtin_nanf("") : _mm512_reduce_max_ps(most);
  const Floats inverse = _mm512_set1_ps(largest == 0 ? 0.0f : kLevels / largest);
  for (int column = 0; column < columns; column += kLanes) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(rotated + column), inverse));
    const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_add_epi32(q, _mm512_set1_epi32(kZero)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(integers + column), bytes);
  }
  static const float kRoot = std::sqrt(float(kRotated));
  *scale = largest / kLevels / kRoot;
}

}  // namespace embert::cpu
