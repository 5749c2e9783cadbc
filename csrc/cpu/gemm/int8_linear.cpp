// engine/quantization/rows.py defines the rows in int8, and the integers are the same to the bit.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "cpu/gemm/epilogue.h"
#include "cpu/gemm/tile.h"
#include "cpu/thread_pool.h"

namespace embert::cpu {
namespace {

constexpr int kRotated = 128;  // columns that are rotated together
constexpr int kZero = 128;     // the unsigned value of 0
constexpr int kDepth = 4;      // adjacent columns that one instruction multiplies and adds

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

// A row x [columns], a multiple of 128, → q + 128, and the row's scale: x · H / √128 is about q · scale.
//
// `rotated` [columns] is scratch for the rotated row. The scale of a row with NaN is NaN.
void quantize(const float* x, int columns, float* rotated, std::uint8_t* integers, float* scale) {
  Floats maxima = _mm512_setzero_ps();
  __mmask16 nan_lanes = 0;  // lanes with NaN, which a maximum ignores
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
      maxima = _mm512_max_ps(_mm512_abs_ps(y[i]), maxima);
      nan_lanes |= _mm512_cmp_ps_mask(y[i], y[i], _CMP_UNORD_Q);
    }
  }
  const float largest = nan_lanes ? __builtin_nanf("") : _mm512_reduce_max_ps(maxima);
  const Floats inverse = _mm512_set1_ps(largest == 0 ? 0.0f : kLevels / largest);
  for (int column = 0; column < columns; column += kLanes) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(rotated + column), inverse));
    const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_add_epi32(q, _mm512_set1_epi32(kZero)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(integers + column), bytes);
  }
  static const float kRoot = std::sqrt(float(kRotated));
  *scale = largest / kLevels / kRoot;
}

// sum + a · b of four adjacent columns each. The intrinsic makes GCC 12 copy every sum and load b for every product:
// twice the time.
inline __m512i dpbusd(__m512i sum, __m512i a, __m512i b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

// As `multiply`: of unsigned a and signed b. `sums` start with `zeros`.
template <int kRows>
inline void multiply(const std::uint8_t* a, std::ptrdiff_t a_stride, const std::int8_t* b, int depth,
                     const std::int32_t* zeros, __m512i (&sums)[kRows][kTileVectors]) {
  for (int v = 0; v < kTileVectors; ++v) {
    const __m512i zero = _mm512_loadu_si512(zeros + v * kLanes);
    for (int row = 0; row < kRows; ++row) sums[row][v] = zero;
  }
  for (int k = 0; k < depth; k += kDepth, b += kDepth * kTileColumns) {
    __m512i b_values[kTileVectors];
    for (int v = 0; v < kTileVectors; ++v) b_values[v] = _mm512_load_si512(b + v * kLanes * kDepth);
    for (int row = 0; row < kRows; ++row) {
      std::int32_t packed;
      std::memcpy(&packed, a + row * a_stride + k, sizeof packed);
      const __m512i a_value = _mm512_set1_epi32(packed);
      for (int v = 0; v < kTileVectors; ++v) {
        sums[row][v] = dpbusd(sums[row][v], a_value, b_values[v]);
      }
    }
  }
}

}  // namespace

Int8LinearAvx512::~Int8LinearAvx512() = default;

Int8LinearAvx512::Int8LinearAvx512(const std::int8_t* weight, const float* scales, const float* bias, int out, int in)
    : LinearLayer(out, in) {
  const std::size_t columns = std::size_t(panels_of(out)) * kTileColumns, bytes = columns * in;
  panels_.reset(static_cast<std::int8_t*>(std::aligned_alloc(64, bytes)));
  if (!panels_) throw std::bad_alloc();
  std::memset(panels_.get(), 0, bytes);
  zeros_.resize(columns);
  scales_.resize(columns);
  bias_.resize(columns);
  std::copy(scales, scales + out, scales_.begin());
  std::copy(bias, bias + out, bias_.begin());
  for (int column = 0; column < out; ++column) {
    const std::int8_t* const from = weight + std::size_t(column) * in;
    std::int8_t* const to = panels_.get() + std::size_t(column / kTileColumns) * in * kTileColumns;
    std::int32_t sum = 0;
    for (int k = 0; k < in; ++k) {
      to[(std::size_t(k / kDepth) * kTileColumns + column % kTileColumns) * kDepth + k % kDepth] = from[k];
      sum += from[k];
    }
    zeros_[column] = -kZero * sum;
  }
}

void Int8LinearAvx512::operator()(const float* x, int rows, const Epilogue& epilogue, float* y, int threads) const {
  const std::size_t stride = in_;
  const auto integers_memory = std::make_unique_for_overwrite<std::uint8_t[]>(rows * stride);
  const auto scales_memory = std::make_unique_for_overwrite<float[]>(rows);
  std::uint8_t* const integers = integers_memory.get();
  float* const row_scales = scales_memory.get();
  for_rows(rows, in_, threads, [&](int row) {
    float* const rotated = scratch<float, Int8LinearAvx512>(stride);
    quantize(x + row * stride, in_, rotated, integers + row * stride, row_scales + row);
  });
  for_tiles(rows, out_, in_, threads, [&](int panel, int first, auto count) {
    constexpr int kRows = count;
    const std::int8_t* const weight = panels_.get() + std::size_t(panel) * in_ * kTileColumns;
    const int column = panel * kTileColumns, columns = std::min(kTileColumns, out_ - column);
    __m512i sums[kRows][kTileVectors];
    multiply<kRows>(integers + first * stride, stride, weight, in_, zeros_.data() + column, sums);
    for (int row = 0; row < kRows; ++row) {
      const Floats scale = _mm512_set1_ps(row_scales[first + row]);
      Floats values[kTileVectors];
      for (int v = 0; v < kTileVectors; ++v) {
        const int offset = column + v * kLanes;
        // As in quantization.products.product: each operation is rounded.
        const Floats scaled = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sums[row][v]), scale),
                                            _mm512_loadu_ps(scales_.data() + offset));
        values[v] = _mm512_add_ps(scaled, _mm512_loadu_ps(bias_.data() + offset));
      }
      store_epilogue(values, epilogue, y, std::ptrdiff_t(first + row) * out_ + column, columns);
    }
  });
}

}  // namespace embert::cpu
