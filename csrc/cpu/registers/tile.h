// A register tile of a float32 product, for linear layers and attention.
#pragma once

#include <cstddef>
#include <utility>

#include "cpu/registers/floats.h"

namespace embert::cpu {

// 6 rows of 4 registers are 24 sums. With 4 registers of b and one of a, 29 of the 32 are in use. A step reads 4 · 64
// and 6 · 4 bytes for 24 products, which take 24 cycles where one of 512 bits starts in each (Zen 4), and 12 where two
// do.
constexpr int kTileRows = 6;
constexpr int kTileLanes = 4;
constexpr int kTileColumns = kTileLanes * kLanes;

// Products in one partial sum. Longer sums are sums of these: for 1 536 products their error is 3 times smaller, for 1
// % of the time.
constexpr int kRun = 128;

// sums[row][lane] += Σₖ a[row · a_stride + k] · b[k · b_stride + 16 · lane …] for k < depth, in order.
template <int kRows, int kWide>
inline void add_products(const float* a, std::ptrdiff_t a_stride, const float* b, std::ptrdiff_t b_stride, int depth,
                         Floats (&sums)[kRows][kWide]) {
  for (int k = 0; k < depth; ++k, b += b_stride) {
    Floats of_b[kWide];
    for (int lane = 0; lane < kWide; ++lane) of_b[lane] = _mm512_loadu_ps(b + lane * kLanes);
    for (int row = 0; row < kRows; ++row) {
      const Floats of_a = _mm512_set1_ps(a[row * a_stride + k]);
      for (int lane = 0; lane < kWide; ++lane) {
        sums[row][lane] = _mm512_fmadd_ps(of_a, of_b[lane], sums[row][lane]);
      }
    }
  }
}

template <int kRows, int kWide>
inline void set_zero(Floats (&sums)[kRows][kWide]) {
  for (int row = 0; row < kRows; ++row) {
    for (int lane = 0; lane < kWide; ++lane) sums[row][lane] = _mm512_setzero_ps();
  }
}

// sums[row][lane] = Σₖ a[row · a_stride + k] · b[k · b_stride + 16 · lane …]: in an order that depends only on `depth`,
// not on the tile's size. So a row's sums are batch-invariant.
template <int kRows, int kWide>
inline void multiply(const float* a, std::ptrdiff_t a_stride, const float* b, std::ptrdiff_t b_stride, int depth,
                     Floats (&sums)[kRows][kWide]) {
  set_zero(sums);
  add_products<kRows, kWide>(a, a_stride, b, b_stride, depth < kRun ? depth : kRun, sums);
  for (int k = kRun; k < depth; k += kRun) {
    Floats run[kRows][kWide];
    set_zero(run);
    const int left = depth - k;
    add_products<kRows, kWide>(a + k, a_stride, b + k * b_stride, b_stride, left < kRun ? left : kRun, run);
    for (int row = 0; row < kRows; ++row) {
      for (int lane = 0; lane < kWide; ++lane) sums[row][lane] = _mm512_add_ps(sums[row][lane], run[row][lane]);
    }
  }
}

// Calls function(std::integral_constant<int, n>) for n = number, 1 to kMax.
template <int kMax, typename Function>
inline void with_constant(int number, const Function& function) {
  if constexpr (kMax > 0) {
    if (number == kMax) {
      function(std::integral_constant<int, kMax>());
    } else {
      with_constant<kMax - 1>(number, function);
    }
  }
}

// The rows of tile number `tile` of `tiles` that share `rows` as evenly as they can: the first, and how many.
struct TileRows {
  int first, count;
};

inline TileRows tile_rows(int rows, int tiles, int tile) {
  const int each = rows / tiles, more = rows % tiles;
  return {tile * each + (tile < more ? tile : more), each + (tile < more)};
}

}  // namespace embert::cpu
