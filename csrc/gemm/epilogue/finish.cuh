// Two elements of y from their accumulators: the common end of our epilogues with bias, activation or residual,
// identical to the bit (EPILOGUES.md).
#pragma once

#include "common/numeric.cuh"
#include "gemm/epilogue/arguments.cuh"
#include "gemm/epilogue/row_stats.cuh"
#include "ops/activation.cuh"

namespace embert::sm90 {

// Two adjacent columns of x·Wᵀ + bias, where a LayerNorm may apply to x.
template <bool kPrescaledRows>
__device__ __forceinline__ float2 normed(float low, float high, ColumnPair<false, kPrescaledRows> constants,
                                         float2 scale) {
  if constexpr (kPrescaledRows) {
    return {fmaf(low, scale.x, fmaf(constants.x, scale.y, constants.y)),
            fmaf(high, scale.x, fmaf(constants.z, scale.y, constants.w))};
  } else {
    return {fmaf(low, scale.x, constants.x), fmaf(high, scale.x, constants.y)};
  }
}

// The scale and shift of rows without a LayerNorm. A prescaled residual without one is multiplied by its columns'
// constants: 0 stands for that, which 1/σ never is.
template <bool kResidual, bool kPrescaledRows>
__device__ __forceinline__ float2 unnormed(float factor) {
  return {kResidual && kPrescaledRows ? 0.0f : factor, 0.0f};
}

// Two adjacent elements of y. `constants`: their columns' constants; `scale`: the row's scale and shift; `next`: the
// next LayerNorm's gammas, with prescaled rows and a residual; `sum`: over the row's group of 16 columns, started by
// the `first` of a lane's two pairs.
template <typename T, Activation kActivation, bool kResidual, bool kPrescaledRows>
__device__ __forceinline__ uint32_t finish(float low, float high, ColumnPair<kResidual, kPrescaledRows> constants,
                                           float2 scale, uint32_t residual, uint32_t next, bool first, float2& sum) {
  if constexpr (kResidual) {
    const float2 residual_pair = unpack_two<T>(residual);
    if constexpr (kPrescaledRows) {
      const bool is_normed = scale.x != 0.0f;  // unnormed()
      low = fmaf(residual_pair.x, is_normed ? scale.x : constants.x, fmaf(constants.x, scale.y, low + constants.y));
      high = fmaf(residual_pair.y, is_normed ? scale.x : constants.z, fmaf(constants.z, scale.y, high + constants.w));
    } else {
      low = fmaf(fmaf(residual_pair.x, scale.x, scale.y), constants.x, low + constants.y);
      high = fmaf(fmaf(residual_pair.y, scale.x, scale.y), constants.z, high + constants.w);
    }
    const float2 two = {low + high, fmaf(low, low, high * high)};
    sum = first ? two : sum + two;
    if constexpr (kPrescaledRows) {
      const float2 gamma = unpack_two<T>(next);
      low *= gamma.x, high *= gamma.y;
    }
  } else if constexpr (kPrescaledRows) {
    low = activate<kActivation, false>(fmaf(low, scale.x, fmaf(constants.x, scale.y, constants.y)));
    high = activate<kActivation, false>(fmaf(high, scale.x, fmaf(constants.z, scale.y, constants.w)));
  } else {
    low = activate<kActivation, false>(fmaf(low, scale.x, constants.x));
    high = activate<kActivation, false>(fmaf(high, scale.x, constants.y));
  }
  return pack_two<T>(low, high);
}

// Dequantizes an INT32 sum: times its row's scale and its column's (ops/quantize.h). Each product is rounded:
// otherwise the compiler may contract the last one and the bias into a multiply-add.
__device__ __forceinline__ float dequantize(int sum, float row_scale_value, float column_scale) {
  return __fmul_rn(__fmul_rn(float(sum), row_scale_value), column_scale);
}

// Dequantizes a warp's sums of 16 rows, accumulators of m16n8: kElements / 2 columns. `of_rows`: the scales of rows
// lane / 4 and lane / 4 + 8; `column_constants`: in shared memory, the scales of each two adjacent columns.
template <int kElements>
__device__ __forceinline__ void dequantize_tile(const int* sums, float2 of_rows, const float2* column_constants,
                                                int lane, float (&scaled)[kElements]) {
#pragma unroll
  for (int i = 0; i < kElements; i += 4) {
    const float2 scale = column_constants[i + lane % 4];
    scaled[i] = dequantize(sums[i], of_rows.x, scale.x);
    scaled[i + 1] = dequantize(sums[i + 1], of_rows.x, scale.y);
    scaled[i + 2] = dequantize(sums[i + 2], of_rows.y, scale.x);
    scaled[i + 3] = dequantize(sums[i + 3], of_rows.y, scale.y);
  }
}

// Two elements of y from such sums, without a residual; with an activation a quarter of it (activation.cuh).
// `constants`: (scale, c, scale, c) of the columns; `scale`: the row's scale; row scales and c include the factor
// pair_factor.
template <Activation kActivation>
__device__ __forceinline__ uint32_t finish_sums(int low, int high, float4 constants, float scale) {
  return activate_pair<kActivation>(pack_two<half_t>(fmaf(__fmul_rn(float(low), scale), constants.x, constants.y),
                                                     fmaf(__fmul_rn(float(high), scale), constants.z, constants.w)));
}

}  // namespace embert::sm90
