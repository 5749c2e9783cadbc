// Arguments of the epilogues of all our GEMMs, as the host passes them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/numeric.cuh"

namespace embert::sm90 {

// Properties of the operands' type: the columns of K in 128 bytes, and the type of sums.
template <typename T>
constexpr int kDepthOf = 128 / int(sizeof(T));
template <typename T>
using SumOf = std::conditional_t<std::is_same_v<T, int8_t>, int, float>;

// The type of stored rows, by the operands' type: with int8, rows between GEMMs are FP16.
template <typename T>
using RowType = std::conditional_t<std::is_same_v<T, int8_t>, half_t, T>;

// The constants of two adjacent columns (fold.cuh): (c, c); with a residual (γ, b, γ, b); without a residual but with
// prescaled rows (s, c, s, c).
template <bool kResidual, bool kPrescaledRows>
using ColumnPair = std::conditional_t<kResidual || kPrescaledRows, float4, float2>;

// Kernel arguments in addition to the tensor maps.
struct GemmArguments {
  const void* columns;      // a ColumnPair for every two columns
  const void* residual;     // [rows, out]; the kernels for many rows read it through a tensor map
  const void* next_gamma;   // [out] of T, of y; only with prescaled rows and a residual
  void* y;                  // [rows, out]; the kernels for many rows write it through a tensor map
  const float2* row_stats;  // of the residual's rows if there is one, else of x's; null: rows are already normalized
  float2* y_stats;          // of y's rows; null: not computed
  int splits;               // parts of row_stats in a group
  int split_columns;        // of a part
  int width;                // columns of the rows that row_stats describe
  float inverse_width;
  float epsilon;
  int m, n, k;
  const uint8_t* prefetch_weights;  // LinearWeights::prefetch_weights; small M only
  int prefetch_lines;               // lines of 128 bytes; 0: none
  bool backwards;                   // start with the last rows; many rows only
  // 2³¹ over the number of tiles across y, rounded up. It replaces a division by that number (TileScheduler). The
  // result is exact while there are fewer than 2³¹ / that number of tiles; many rows only.
  uint32_t columns_inverse;
  float mean_scale;  // of Σr: inverse_width, or 0 for RMSNorm
};

// Additional arguments of int8 operands (ops/quantize.h). A sum is multiplied by its row's scale, then by its
// column's.
struct DequantScales {
  const float* rows;       // [rows] of x
  const float2* columns;   // of each two adjacent columns; only with a residual: else `columns` is (scale, c, scale, c)
  void* maxima = nullptr;  // FP16 [rows, blocks]: the block maxima of y, or of x (ops/blocks.cuh)
};

template <bool kResidual, bool kPrescaledRows>
__device__ __forceinline__ const ColumnPair<kResidual, kPrescaledRows>* column_pairs(const GemmArguments& args) {
  return static_cast<const ColumnPair<kResidual, kPrescaledRows>*>(args.columns);
}
__device__ __forceinline__ const uint32_t* next_gamma_pairs(const GemmArguments& args) {
  return static_cast<const uint32_t*>(args.next_gamma);
}

}  // namespace embert::sm90
