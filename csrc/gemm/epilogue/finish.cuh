// Two elements of y from their accumulators: the common end of all our epilogues, identical to the bit
// (EPILOGUES.md).
#pragma once

#include "common/numeric.cuh"
#include "gemm/epilogue/arguments.cuh"
#include "gemm/epilogue/row_stats.cuh"
#include "ops/activation.cuh"
#include "ops/activation_pair.cuh"

namespace embert::hopper {

// Two adjacent columns of x·Wᵀ + bias, where a LayerNorm may apply to x.
template <bool kPrescaledRows>
__device__ __forceinline__ float2 normed(float low, float high, ColumnPair<false, kPrescaledRows> k, float2 by) {
  if constexpr (kPrescaledRows) {
    return {fmaf(low, by.x, fmaf(k.x, by.y, k.y)), fmaf(high, by.x, fmaf(k.z, by.y, k.w))};
  } else {
    return {fmaf(low, by.x, k.x), fmaf(high, by.x, k.y)};
  }
}

// Two adjacent elements of y. `k`: their columns' constants; `by`: the row's scale and shift; `next`: the next
// LayerNorm's gammas, with prescaled rows and a residual; `sum`: over the row's group of 16 columns, started by the
// `first` of a lane's two pairs.
template <typename T, Activation kActivation, bool kResidual, bool kPrescaledRows>
__device__ __forceinline__ uint32_t finish(float low, float high, ColumnPair<kResidual, kPrescaledRows> k, float2 by,
                                           uint32_t residual, uint32_t next, bool first, float2& sum) {
  if constexpr (kResidual) {
    const float2 rest = unpack_two<T>(residual);
    if constexpr (kPrescaledRows) {
      low = fmaf(rest.x, by.x, fmaf(k.x, by.y, low + k.y));
      high = fmaf(rest.y, by.x, fmaf(k.z, by.y, high + k.w));
    } else {
      low = fmaf(fmaf(rest.x, by.x, by.y), k.x, low + k.y);
      high = fmaf(fmaf(rest.y, by.x, by.y), k.z, high + k.w);
    }
    const float2 two = {low + high, fmaf(low, low, high * high)};
    sum = first ? two : sum + two;
    if constexpr (kPrescaledRows) {
      const float2 gamma = unpack_two<T>(next);
      low *= gamma.x, high *= gamma.y;
    }
  } else if constexpr (kPrescaledRows) {
    low = activate<kActivation, false>(fmaf(low, by.x, fmaf(k.x, by.y, k.y)));
    high = activate<kActivation, false>(fmaf(high, by.x, fmaf(k.z, by.y, k.w)));
  } else {
    low = activate<kActivation, false>(fmaf(low, by.x, k.x));
    high = activate<kActivation, false>(fmaf(high, by.x, k.y));
  }
  return pack_two<T>(low, high);
}

// Dequantizes an INT32 sum: times its row's scale and its column's (ops/quantize.h). Each product is rounded:
// otherwise the compiler may contract the last one and the bias into a multiply-add.
__device__ __forceinline__ float dequantize(int sum, float of_row, float of_column) {
  return __fmul_rn(__fmul_rn(float(sum), of_row), of_column);
}

// Dequantizes a warp's sums of 16 rows, accumulators of m16n8: kElements / 2 columns. `of_rows`: the scales of rows
// lane / 4 and lane / 4 + 8; `of_columns`: in shared memory, the scales of each two adjacent columns.
template <int kElements>
__device__ __forceinline__ void dequantize_tile(const int* sums, float2 of_rows, const float2* of_columns, int lane,
                                                float (&scaled)[kElements]) {
#pragma unroll
  for (int i = 0; i < kElements; i += 4) {
    const float2 by = of_columns[i + lane % 4];
    scaled[i] = dequantize(sums[i], of_rows.x, by.x);
    scaled[i + 1] = dequantize(sums[i + 1], of_rows.x, by.y);
    scaled[i + 2] = dequantize(sums[i + 2], of_rows.y, by.x);
    scaled[i + 3] = dequantize(sums[i + 3], of_rows.y, by.y);
  }
}

// Two elements of y from such sums, without a residual; with an activation a quarter of it (activation_pair.cuh).
// `k`: (scale, c, scale, c) of the columns; `by`: the row's scale; row scales and c include the factor pair_factor.
template <Activation kActivation>
__device__ __forceinline__ uint32_t finish_sums(int low, int high, float4 k, float by) {
  return activate_pair<kActivation>(
      pack_two<half_t>(fmaf(__fmul_rn(float(low), by), k.x, k.y), fmaf(__fmul_rn(float(high), by), k.z, k.w)));
}

}  // namespace embert::hopper
