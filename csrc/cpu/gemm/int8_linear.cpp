// engine/quantization/rows.py defines the rows in int8, and the integers are the same to the bit.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/functions.h"
#include "cpu/gemm/epilogue.h"
#include "cpu/gemm/tile.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/thread_pool.h"

namespace embert::cpu::EMBERT_ISA {
namespace {

constexpr int kRotated = 128;                   // columns that are rotated together
constexpr int kDepth = int(4 / sizeof(Input));  // adjacent columns that one instruction multiplies and adds
constexpr int kRegisters = kRotated / kLanes;
constexpr float kLevels = 127.0f;

// 1 for the first lane of each pair of lanes that lie `kStride` apart, -1 for the second.
template <int kStride>
inline Floats signs() {
  alignas(64) static constexpr auto kSigns = [] {
    std::array<float, kLanes> lanes;
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane & kStride ? -1.0f : 1.0f;
    return lanes;
  }();
  return load(kSigns.data());
}

// A butterfly of lanes that lie `kStride` apart: the first of a pair becomes their sum, the second their difference.
template <int kStride>
inline Floats butterfly(Floats x) {
  return fma(x, signs<kStride>(), exchange<kStride>(x));  // rounded once, as the sum is
}

// Butterflies of lanes that lie 1, 2, … kLanes / 2 apart.
template <int kStride = 1>
inline Floats butterflies(Floats x) {
  if constexpr (kStride < kLanes) return butterflies<2 * kStride>(butterfly<kStride>(x));
  return x;
}

// Butterflies of registers that lie 1, 2, … kRegisters / 2 apart.
inline void butterflies(Floats (&x)[kRegisters]) {
  for (int stride = 1; stride < kRegisters; stride *= 2) {
    for (int i = 0; i < kRegisters; ++i) {
      if (i & stride) continue;
      const Floats first = x[i], second = x[i + stride];
      x[i] = first + second;
      x[i + stride] = first - second;
    }
  }
}

// A row x [columns], a multiple of 128, → q + kInputZero, and the row's scale: x · H / √128 is about q · scale.
//
// `rotated` [columns] is scratch for the rotated row. The scale of a row with NaN is NaN.
void quantize(const float* x, int columns, float* rotated, Input* integers, float* scale) {
  Floats maxima = zero();
  bool has_nan = false;  // which a maximum ignores
  for (int column = 0; column < columns; column += kRotated) {
    Floats y[kRegisters];
    for (int i = 0; i < kRegisters; ++i) y[i] = butterflies(load(x + column + i * kLanes));
    butterflies(y);
    for (int i = 0; i < kRegisters; ++i) {
      store(rotated + column + i * kLanes, y[i]);
      maxima = maximum(absolute(y[i]), maxima);
    }
    for (int i = 0; i < kRegisters; i += 2) has_nan |= any_nan(y[i], y[i + 1]);
  }
  const float highest = has_nan ? __builtin_nanf("") : largest(maxima);
  const Floats inverse = broadcast(highest == 0 ? 0.0f : kLevels / highest);
  for (int column = 0; column < columns; column += kLanes)
    store_inputs(integers + column, load(rotated + column) * inverse);
  static const float kRoot = std::sqrt(float(kRotated));
  *scale = highest / kLevels / kRoot;
}

// As `multiply`, of integers. `sums` start with `zeros`.
template <int kRows>
inline void multiply(const Input* a, std::ptrdiff_t a_stride, const Weight* b, int depth, const std::int32_t* zeros,
                     Ints (&sums)[kRows][kTileVectors], std::ptrdiff_t ahead) {
  for (int v = 0; v < kTileVectors; ++v) {
    const Ints first = load_ints(zeros + v * kLanes, kLanes);
    for (int row = 0; row < kRows; ++row) sums[row][v] = first;
  }
  for (int k = 0; k < depth; k += kDepth, b += kDepth * kTileColumns) {
    Ints b_values[kTileVectors];
    for (int v = 0; v < kTileVectors; ++v) b_values[v] = load_weights(b + v * kLanes * kDepth);
    prefetch<kTileVectors>(b + ahead);
    for (int row = 0; row < kRows; ++row) {
      std::int32_t packed;
      std::memcpy(&packed, a + row * a_stride + k, sizeof packed);
      const Ints a_value = packed + Ints{};
      for (int v = 0; v < kTileVectors; ++v) sums[row][v] = add_dot(sums[row][v], a_value, b_values[v]);
    }
  }
}

class Int8Linear final : public LinearLayer {
 public:
  Int8Linear(const std::int8_t* weight, const float* scales, const float* bias, int out, int in)
      : LinearLayer(out, in), panels_(columns() * in), zeros_(columns()), scales_(columns()), bias_(columns()) {
    std::copy(scales, scales + out, scales_.data());
    std::copy(bias, bias + out, bias_.data());
    for (int column = 0; column < out; ++column) {
      const std::int8_t* const from = weight + std::size_t(column) * in;
      Weight* const to = panels_.data() + std::size_t(column / kTileColumns) * in * kTileColumns;
      std::int32_t sum = 0;
      for (int k = 0; k < in; ++k) {
        to[(std::size_t(k / kDepth) * kTileColumns + column % kTileColumns) * kDepth + k % kDepth] = from[k];
        sum += from[k];
      }
      zeros_[column] = -kInputZero * sum;
    }
  }

  void operator()(const float* x, int rows, const Epilogue& epilogue, float* y, int threads) const override {
    struct Kernel;
    // In the calling thread's memory, which the others read.
    Input* const integers = scratch<Input, Kernel>(std::size_t(rows) * in_);
    float* const row_scales = scratch<float, Kernel>(rows);
    for_rows(rows, in_, threads, [&](int row) {
      const std::size_t offset = std::size_t(row) * in_;
      quantize(x + offset, in_, scratch<float, Int8Linear>(in_), integers + offset, row_scales + row);
    });
    for_tiles(rows, out_, in_, threads, [&](int panel, int first, auto count) {
      constexpr int kRows = count;
      const Weight* const weight = panels_.data() + std::size_t(panel) * in_ * kTileColumns;
      const int column = panel * kTileColumns, width = std::min(kTileColumns, out_ - column);
      Ints sums[kRows][kTileVectors];
      multiply<kRows>(integers + std::size_t(first) * in_, in_, weight, in_, zeros_.data() + column, sums,
                      std::ptrdiff_t{in_} * kTileColumns);
      Floats values[kRows][kTileVectors];
      for (int row = 0; row < kRows; ++row) {
        const Floats scale = broadcast(row_scales[first + row]);
        for (int v = 0; v < kTileVectors; ++v) {
          const int offset = column + v * kLanes;
          // As in quantization.products.product: each operation is rounded.
          values[row][v] =
              as_floats(sums[row][v]) * scale * load(scales_.data() + offset) + load(bias_.data() + offset);
        }
      }
      store_epilogue(values, epilogue, y, std::ptrdiff_t(first) * out_ + column, out_, width);
    });
  }

 private:
  std::size_t columns() const { return std::size_t(panels_of(out_)) * kTileColumns; }

  Array<Weight> panels_;        // [⌈out / kTileColumns⌉, in / kDepth, kTileColumns, kDepth]
  Array<std::int32_t> zeros_;   // [columns()]: -kInputZero times the sum of a channel's integers
  Array<float> scales_, bias_;  // likewise
};

}  // namespace

std::unique_ptr<LinearLayer> int8_linear(const std::int8_t* weight, const float* scales, const float* bias, int out,
                                         int in) {
  return std::make_unique<Int8Linear>(weight, scales, bias, out, in);
}

}  // namespace embert::cpu::EMBERT_ISA
