// Makes rows in FP16 of sums of integers: scales, then what the Hopper tiles do after them, to the bit (finish.cuh).
//
// A lane has 8 neighbouring columns, whose constants stay in its registers, and a warp 256 of one row after the other:
// sums are read 32 bytes a lane, rows 16. Floor for 2 048 rows of 4 096: 34 MB of sums read, which the L2 cache may
// still hold, and 17 MB written.

#include <algorithm>

#include "common/dependent_launch.cuh"
#include "gemm/epilogue/finish.cuh"
#include "gemm/int8/rescale.h"

namespace embert {
namespace {

constexpr int kWarps = 4;
constexpr int kColumns = 8;                // of a lane
constexpr int kMostBlocks = 132 * 16;      // what an H100 can hold; a warp then takes several rows
constexpr int kPieces = kStatColumns / 8;  // lanes of a group of sums

struct Residual {
  RowView rows;
  Norm norm;
  float epsilon;
};

template <int kCount>
__device__ __forceinline__ void load_vector(float (&to)[kCount], const float* from) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const Pack<float> four = load_pack(from + i);
#pragma unroll
    for (int k = 0; k < 4; ++k) to[i + k] = four.values[k];
  }
}

// The sums of a group of 128 columns in the order of row_stats.cuh; every lane gets its group's. `pairs`: of the lane's
// four pairs of columns. Two lanes have a piece of 16, and share out the places that four have in an m16n8 tile.
__device__ __forceinline__ float2 group_sums(const float2 (&pairs)[4], int lane) {
  const bool odd = lane % 2 != 0;
  const float2 first = (odd ? pairs[1] : pairs[0]) + from_lane(odd ? pairs[0] : pairs[1], 1);
  const float2 second = (odd ? pairs[3] : pairs[2]) + from_lane(odd ? pairs[2] : pairs[3], 1);
  float2 sum = first + second;
#pragma unroll
  for (int step = 1; step < kPieces; step *= 2) sum = sum + from_lane(sum, step);
  return sum;
}

template <Activation kActivation, bool kResidual>
__global__ void __launch_bounds__(kWarps * 32)
    rescale_kernel(const IntegerSums of, const Residual residual, half_t* y, float2* y_stats) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = (blockIdx.x * 32 + lane) * kColumns;
  const bool inside = column < of.out;  // the others have zeros throughout, and add them to their group
  dependents_may_launch();
  float scales[kColumns] = {}, constants[kColumns] = {}, gammas[kResidual ? kColumns : 4] = {};
  if (inside) {
    load_vector(scales, of.column_scales + column);
    load_vector(constants, of.bias + column);
    if constexpr (kResidual) {
      float betas[kColumns];
      load_vector(gammas, residual.norm.gamma + column);
      load_vector(betas, residual.norm.beta + column);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) constants[i] += betas[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) constants[i] *= pair_factor(kActivation);
  wait_for_earlier_kernels();
  for (int row = blockIdx.y * kWarps + warp; row < of.rows; row += gridDim.y * kWarps) {
    const size_t at = size_t(row) * of.out + column;
    int sums[kColumns] = {};
    Pack<half_t> rest = {}, packed;
    if (inside) {
      *reinterpret_cast<int4*>(sums) = *reinterpret_cast<const int4*>(of.sums + at);
      *reinterpret_cast<int4*>(sums + 4) = *reinterpret_cast<const int4*>(of.sums + at + 4);
      if constexpr (kResidual) rest = load_fresh(static_cast<const half_t*>(residual.rows.data) + at);
    }
    const float by = pair_factor(kActivation) * of.row_scales[row];
    auto* const words = reinterpret_cast<uint32_t*>(&packed);
    if constexpr (kResidual) {
      const float2 normal = row_scale(residual.rows, row, of.out, residual.epsilon, lane % 8);
      const auto* const rests = reinterpret_cast<const uint32_t*>(&rest);
      float2 pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int low = 2 * i, high = low + 1;
        words[i] = hopper::finish<half_t, Activation::kNone, true, false>(
            hopper::dequantize(sums[low], by, scales[low]), hopper::dequantize(sums[high], by, scales[high]),
            {gammas[low], constants[low], gammas[high], constants[high]}, normal, rests[i], 0, true, pairs[i]);
      }
      const float2 group = group_sums(pairs, lane);
      const int groups = (of.out + kStatColumns - 1) / kStatColumns;
      if (inside && lane % kPieces == 0) y_stats[size_t(row) * groups + column / kStatColumns] = group;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int low = 2 * i, high = low + 1;
        words[i] = hopper::finish_sums<kActivation>(sums[low], sums[high],
                                                    {scales[low], constants[low], scales[high], constants[high]}, by);
      }
    }
    if (inside) store_pack(y + at, packed);
  }
}

template <Activation kActivation, bool kResidual>
Status launch_rescale(const IntegerSums& of, const Residual& residual, void* y, float2* y_stats, const Stream& stream) {
  if (of.out % kColumns != 0 || of.out < kColumns)
    return Status::refused("rescale: rows of " + std::to_string(of.out) + " columns; they must be a multiple of 8");
  const int across = (of.out + 32 * kColumns - 1) / (32 * kColumns), down = (of.rows + kWarps - 1) / kWarps;
  const dim3 grid(across, std::min(down, std::max(kMostBlocks / across, 1)));
  return launch("rescale", rescale_kernel<kActivation, kResidual>, grid, kWarps * 32, 0, stream, of, residual,
                static_cast<half_t*>(y), y_stats);
}

}  // namespace

Status rescale_rows(const IntegerSums& of, Activation activation, void* y, const Stream& stream) {
  switch (activation) {
    case Activation::kNone:
      return launch_rescale<Activation::kNone, false>(of, {}, y, nullptr, stream);
    case Activation::kGeluErf:
      return launch_rescale<Activation::kGeluErf, false>(of, {}, y, nullptr, stream);
    case Activation::kGeluTanh:
      return launch_rescale<Activation::kGeluTanh, false>(of, {}, y, nullptr, stream);
    case Activation::kRelu:
      return launch_rescale<Activation::kRelu, false>(of, {}, y, nullptr, stream);
    default:
      return Status::refused("rescale: SiLU comes with gates, which are for 16 bits");
  }
}

Status rescale_onto_residual(const IntegerSums& of, const RowView& residual, const Norm& norm, float epsilon, void* y,
                             float2* y_stats, const Stream& stream) {
  if (of.out > kMaxStatColumns)
    return Status::refused("rescale: a LayerNorm of " + std::to_string(of.out) + " columns, at most " +
                           std::to_string(kMaxStatColumns) + " can be run");
  return launch_rescale<Activation::kNone, true>(of, {residual, norm, epsilon}, y, y_stats, stream);
}

}  // namespace embert
