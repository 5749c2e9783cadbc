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

// Integers of 16 bits leave room for sums, so two adjacent pairs of columns need one multiplication (Winograd's inner
// product): a₀w₀ + a₁w₁ = (a₀ + w₁) · (a₁ + w₀) - a₀a₁ - w₀w₁, where the last two terms are known for each row and
// each channel. The instruction adds and multiplies as many columns, but the multiplier does half the work.
constexpr bool kShares = kDepth == 2;
constexpr int kPairs = kShares ? 2 : 1;  // of a step
constexpr int kStep = kPairs * kDepth;
// With 2 registers of sums in a row, 4 of b, 2 of a and 2 of factors, 4 rows need 16.
constexpr int kInt8Rows = kShares ? 4 : kTileRows;

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

inline Ints add_shorts(Ints a, Ints b) {
  using Shorts = std::int16_t __attribute__((vector_size(EMBERT_REGISTER_BYTES)));
  return Ints(Shorts(a) + Shorts(b));
}

struct QuantizedRow {
  float scale;
  std::int32_t excess;  // in the sums of each channel
};

// A row x [columns], a multiple of 128, → q + kInputZero: x · H / √128 is about q · scale.
//
// `rotated` [columns] is scratch for the rotated row. The scale of a row with NaN is NaN.
QuantizedRow quantize(const float* x, int columns, float* rotated, Input* integers) {
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
  std::int32_t excess = 0;
  if constexpr (kShares) {
    Ints sums{};
    for (int column = 0; column < columns; column += kDepth * kLanes) {
      const Ints pairs = load_integers(integers + column);
      sums = add_dot(sums, pairs, Ints(exchange<1>(Floats(pairs))));
    }
    for (int lane = 0; lane < kLanes; lane += 2) excess += sums[lane];
  }
  static const float kRoot = std::sqrt(float(kRotated));
  return {highest / kLevels / kRoot, excess};
}

// As `multiply`, of integers. sums[row] start with `zeros`, less the row's excess.
template <int kRows>
inline void multiply(const Input* a, std::ptrdiff_t a_stride, const QuantizedRow* a_rows, const Weight* b, int depth,
                     const std::int32_t* zeros, Ints (&sums)[kRows][kTileVectors], std::ptrdiff_t ahead) {
  for (int v = 0; v < kTileVectors; ++v) {
    const Ints first = load_ints(zeros + v * kLanes, kLanes);
    for (int row = 0; row < kRows; ++row) sums[row][v] = kShares ? first - a_rows[row].excess : first;
  }
  for (int k = 0; k < depth; k += kStep, b += kStep * kTileColumns) {
    Ints b_values[kPairs][kTileVectors];
    for (int pair = 0; pair < kPairs; ++pair) {
      const Weight* const from = b + pair * kDepth * kTileColumns;
      for (int v = 0; v < kTileVectors; ++v) b_values[pair][v] = load_integers(from + v * kLanes * kDepth);
      prefetch<kTileVectors>(from + ahead);
    }
    for (int row = 0; row < kRows; ++row) {
      Ints a_values[kPairs];
      for (int pair = 0; pair < kPairs; ++pair) {
        std::int32_t packed;
        std::memcpy(&packed, a + row * a_stride + k + pair * kDepth, sizeof packed);
        a_values[pair] = packed + Ints{};
      }
      for (int v = 0; v < kTileVectors; ++v) {
        Ints first = a_values[0], second = b_values[0][v];
        if constexpr (kShares) {
          first = add_shorts(first, b_values[1][v]);
          second = add_shorts(a_values[1], second);
        }
        sums[row][v] = add_dot(sums[row][v], first, second);
      }
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
        sum += kInputZero * from[k];
        if (kShares && k % kStep < kDepth) sum += from[k] * from[k + kDepth];
      }
      zeros_[column] = -sum;
    }
  }

  void operator()(const float* x, int rows, const Epilogue& epilogue, float* y, int threads) const override {
    struct Kernel;
    // In the calling thread's memory, which the others read.
    Input* const integers = scratch<Input, Kernel>(std::size_t(rows) * in_);
    QuantizedRow* const quantized = scratch<QuantizedRow, Kernel>(rows);
    for_rows(rows, in_, threads, [&](int row) {
      const std::size_t offset = std::size_t(row) * in_;
      quantized[row] = quantize(x + offset, in_, scratch<float, Int8Linear>(in_), integers + offset);
    });
    for_tiles<kInt8Rows, 1>(rows, out_, in_, threads, [&](int column, int first, auto count, auto) {
      constexpr int kRows = count;
      const Weight* const weight = panels_.data() + panel_offset(column, in_);
      const int width = std::min(kTileColumns, out_ - column);
      Ints sums[kRows][kTileVectors];
      multiply<kRows>(integers + std::size_t(first) * in_, in_, quantized + first, weight, in_, zeros_.data() + column,
                      sums, std::ptrdiff_t{in_} * kTileColumns);
      Floats values[kRows][kTileVectors];
      for (int row = 0; row < kRows; ++row) {
        const Floats scale = broadcast(quantized[first + row].scale);
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
  Array<std::int32_t> zeros_;   // [columns()]: what a channel's sums start with
  Array<float> scales_, bias_;  // likewise
};

}  // namespace

std::unique_ptr<LinearLayer> int8_linear(const std::int8_t* weight, const float* scales, const float* bias, int out,
                                         int in) {
  return std::make_unique<Int8Linear>(weight, scales, bias, out, in);
}

}  // namespace embert::cpu::EMBERT_ISA
