// What the epilogues of all our products read, as the host passes it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/numeric.cuh"

namespace embert::hopper {

// What differs with the type of the operands: the columns of K in 128 bytes, and what sums are.
template <typename T>
constexpr int kDepthOf = 128 / int(sizeof(T));
template <typename T>
using SumOf = std::conditional_t<std::is_same_v<T, int8_t>, int, float>;

// The type in which rows are stored, by that of the operands: with 8 bits, rows between products are FP16.
template <typename T>
using RowType = std::conditional_t<std::is_same_v<T, int8_t>, half_t, T>;

// The constants of two neighbouring columns (fold.cuh): (c, c); with a residual (γ, b, γ, b); without one but with
// gamma in the rows (s, c, s, c).
template <bool kResidual, bool kPrescaledRows>
using ColumnPair = std::conditional_t<kResidual || kPrescaledRows, float4, float2>;

// What a kernel takes beside the tensor maps.
struct GemmArguments {
  const void* columns;      // a ColumnPair for every two columns
  const void* residual;     // [rows, out]; the kernels for many rows read it through a tensor map
  const void* next_gamma;   // [out] of T, of y; read where gamma is in the rows and there is a residual
  void* y;                  // [rows, out]; written through a tensor map likewise
  const float2* row_stats;  // of the residual's rows if there is one, else of x's; null: they are normalized already
  float2* y_stats;          // of y's rows; null: not wanted
  int splits;               // of row_stats, in a group
  int split_columns;        // of a part
  int width;                // columns of the rows that row_stats describe
  float inverse_width;
  float epsilon;
  int m, n, k;
  const uint8_t* ahead;  // LinearWeights::ahead; few rows only
  int ahead_lines;       // of 128 bytes; 0: none
  bool backwards;        // start with the last rows; many rows only
  // 2³¹ over the number of tiles across y, rounded up. It replaces a division by that number (TileScheduler), exactly
  // as long as there are fewer than 2³¹ / that number of tiles; many rows only.
  uint32_t columns_inverse;
};

// What operands of 8 bits (ops/quantize.h) take beside them. A sum is multiplied with its row's scale, then with its
// column's.
struct ProductScales {
  const float* rows;       // [rows] of x
  const float2* columns;   // two neighbouring columns' each; a residual only: else (scale, c, scale, c) are the columns
  void* maxima = nullptr;  // FP16 [rows, blocks]: what y's blocks leave, or x's have left (ops/blocks.cuh)
};

template <bool kResidual, bool kPrescaledRows>
__device__ __forceinline__ const ColumnPair<kResidual, kPrescaledRows>* column_pairs(const GemmArguments& args) {
  return static_cast<const ColumnPair<kResidual, kPrescaledRows>*>(args.columns);
}
__device__ __forceinline__ const uint32_t* next_gamma_pairs(const GemmArguments& args) {
  return static_cast<const uint32_t*>(args.next_gamma);
}

}  // namespace embert::hopper
