#include "cpu/products/int8_linear.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "cpu/products/panels.h"
#include "cpu/products/quantize.h"
#include "cpu/registers/finish.h"
#include "cpu/registers/tile.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

namespace embert::cpu {
namespace {

constexpr int kDepth = 4;            // adjacent columns that one instruction multiplies and adds
constexpr int kMaxSerial = 1 << 15;  // elements for which one thread suffices to quantize: 11 µs on Zen 4

// sum + a · b of four adjacent columns each. The intrinsic makes GCC 12 copy every sum and load b for every product:
// twice the time.
inline __m512i with_products(__m512i sum, __m512i a, __m512i b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

// As `multiply`: of unsigned a and signed b. `sums` start with `zeros`.
template <int kRows>
inline void multiply(const std::uint8_t* a, std::ptrdiff_t a_stride, const std::int8_t* b, int depth,
                     const std::int32_t* zeros, __m512i (&sums)[kRows][kTileLanes]) {
  for (int lane = 0; lane < kTileLanes; ++lane) {
    const __m512i zero = _mm512_loadu_si512(zeros + lane * kLanes);
    for (int row = 0; row < kRows; ++row) sums[row][lane] = zero;
  }
  for (int k = 0; k < depth; k += kDepth, b += kDepth * kTileColumns) {
    __m512i of_b[kTileLanes];
    for (int lane = 0; lane < kTileLanes; ++lane) of_b[lane] = _mm512_load_si512(b + lane * kLanes * kDepth);
    for (int row = 0; row < kRows; ++row) {
      std::int32_t packed;
      std::memcpy(&packed, a + row * a_stride + k, sizeof packed);
      const __m512i of_a = _mm512_set1_epi32(packed);
      for (int lane = 0; lane < kTileLanes; ++lane) {
        sums[row][lane] = with_products(sums[row][lane], of_a, of_b[lane]);
      }
    }
  }
}

}  // namespace

Int8LinearAvx512::~Int8LinearAvx512() = default;

void Int8LinearAvx512::Free::operator()(std::int8_t* memory) const {
  std::free(memory);
}

Int8LinearAvx512::Int8LinearAvx512(const std::int8_t* weight, const float* scales, const float* bias, int out, int in)
    : out_(out), in_(in) {
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
  const auto take = [&](int row) {
    float* const rotated = scratch<float, Int8LinearAvx512>(stride);
    quantize(x + row * stride, in_, rotated, integers + row * stride, row_scales + row);
  };
  const int pieces = std::max<int>(1, std::min<std::size_t>(rows, rows * stride / kMaxSerial));
  ThreadPool::shared().run(threads, pieces, [&](int piece) {
    const TileRows range = tile_rows(rows, pieces, piece);
    for (int row = range.first; row < range.first + range.count; ++row) take(row);
  });
  for_tiles(rows, out_, threads, [&](int panel, int first, auto count) {
    constexpr int kRows = count;
    const std::int8_t* const weight = panels_.get() + std::size_t(panel) * in_ * kTileColumns;
    const int column = panel * kTileColumns, columns = std::min(kTileColumns, out_ - column);
    __m512i sums[kRows][kTileLanes];
    multiply<kRows>(integers + first * stride, stride, weight, in_, zeros_.data() + column, sums);
    for (int row = 0; row < kRows; ++row) {
      const Floats scale = _mm512_set1_ps(row_scales[first + row]);
      Floats values[kTileLanes];
      for (int lane = 0; lane < kTileLanes; ++lane) {
        const int offset = column + lane * kLanes;
        // As in quantization.products.product: each operation is rounded.
        const Floats scaled = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sums[row][lane]), scale),
                                            _mm512_loadu_ps(scales_.data() + offset));
        values[lane] = _mm512_add_ps(scaled, _mm512_loadu_ps(bias_.data() + offset));
      }
      finish(values, epilogue, y, std::ptrdiff_t(first + row) * out_ + column, columns);
    }
  });
}

}  // namespace embert::cpu
