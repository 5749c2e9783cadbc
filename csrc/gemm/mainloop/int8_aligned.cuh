// The main loop for x quantized in blocks (ops/blocks.cuh). The int8 values of a block are rescaled to the scale of
// their row on the way from shared memory to registers, from which wgmma takes its left operand. This overlaps with
// the products of the previous step.
#pragma once

#include "common/shared_memory.cuh"
#include "common/warp.cuh"
#include "gemm/mainloop/pipeline.cuh"
#include "ops/blocks.cuh"

namespace embert::sm90 {

// The block maxima of two rows: those of a lane's accumulators of m16n8.
template <int kBlock>
class BlockMaxima {
 public:
  static constexpr int kPerStep = kDepthOf<int8_t> / kBlock;  // blocks in a step

  BlockMaxima() = default;
  // Rows past the end are read as the last row.
  __device__ __forceinline__ BlockMaxima(const void* maxima, int row, int rows, int blocks)
      : first_(static_cast<const uint16_t*>(maxima) + min(row, rows - 1) * blocks),
        second_(static_cast<const uint16_t*>(maxima) + min(row + 8, rows - 1) * blocks) {}

  // The row maximum of each of the two rows.
  __device__ __forceinline__ __half2 largest(int blocks, int lane) const {
    __half2 maximum = as_half2(0);
    for (int i = lane % 4; i < blocks; i += 4) maximum = __hmax2_nan(maximum, as_half2(pair(first_[i], second_[i])));
    return larger_of_row(maximum);
  }
  // Starts the loads of a step's maxima, for `factors`.
  __device__ __forceinline__ void prefetch(int step) {
    if constexpr (kPerStep == 2) {
      prefetched_[0] = reinterpret_cast<const uint32_t*>(first_)[step];
      prefetched_[1] = reinterpret_cast<const uint32_t*>(second_)[step];
    } else {
      prefetched_[0] = first_[step], prefetched_[1] = second_[step];
    }
  }
  __device__ __forceinline__ BlockFactors factors(int block_of_step, float2 inverses) const {
    const uint32_t both =
        block_of_step == 0 ? pair(prefetched_[0], prefetched_[1]) : __byte_perm(prefetched_[0], prefetched_[1], 0x7632);
    return {as_half2(both), inverses};
  }

 private:
  static __device__ __forceinline__ uint32_t pair(uint32_t first, uint32_t second) {
    return __byte_perm(first, second, 0x5410);
  }
  const uint16_t *first_, *second_;
  uint32_t prefetched_[2];
};

// The factors of a lane's sums of two rows of x: the rows' scales, or the maxima of their blocks (kBlock columns,
// if there are blocks).
template <int kBlock>
struct XScales {
  BlockMaxima<kBlock> maxima;
  __half2 largest;
  float2 inverses;

  __device__ __forceinline__ void read(const GemmArguments& args, const DequantScales& scales, int first_row,
                                       int lane) {
    const int blocks = args.k / kBlock;
    maxima = {scales.maxima, first_row, args.m, blocks};
    maxima.prefetch(0);
    largest = maxima.largest(blocks, lane);
    inverses = row_inverses_of(largest);
  }
  __device__ __forceinline__ float2 of_rows() const { return row_scales_of<kBlock>(largest); }
};
template <>
struct XScales<0> {
  float2 scales;

  __device__ __forceinline__ void read(const GemmArguments& args, const DequantScales& from, int first_row, int) {
    scales = {from.rows[min(first_row, args.m - 1)], from.rows[min(first_row + 8, args.m - 1)]};
  }
  __device__ __forceinline__ float2 of_rows() const { return scales; }
};

// The main loop (pipeline.cuh) for 64 rows of such an x. `x_dequant` has been read. Half a step is multiplied while the
// next half is rescaled: 16 registers hold both.
//
// While wgmma runs, a warp issues one instruction in four cycles or more, and a step of both consumers takes 1 024
// cycles. So the code around the rescaling is short: addresses that the compiler would recompute stay in registers.
template <int kBlock, typename Shape, int kElements, typename Committed>
__device__ __forceinline__ uint32_t mainloop_aligned(const Pipeline& pipeline, PipelineState<Shape::kStages>& state,
                                                     int steps, int consumer_row, int warp, int lane,
                                                     XScales<kBlock>& x_dequant, int (&c)[kElements],
                                                     const Committed& committed) {
  using Maxima = BlockMaxima<kBlock>;
  // Read from lane 0, so that wgmma's operands stay in uniform registers (common/warp.cuh).
  state = {__shfl_sync(~0u, state.stage, 0), __shfl_sync(~0u, state.phase, 0)};
  uint32_t last_stage = state.stage;
  // The lane's part of the first stage. The address 32 columns further differs by an exclusive or with 32.
  uint32_t consumer_x = pipeline.base + (consumer_row + warp * 16) * 128 + swizzle_128b(lane % 16, lane / 16);
  uint32_t w_from = uint32_t(make_descriptor(pipeline.base + Shape::kXBytes));
  keep(consumer_x), keep(w_from);
  for (int step = 0; step < steps; ++step) {
    BlockFactors factors[Maxima::kPerStep];
#pragma unroll
    for (int i = 0; i < Maxima::kPerStep; ++i) factors[i] = x_dequant.maxima.factors(i, x_dequant.inverses);
    x_dequant.maxima.prefetch(min(step + 1, steps - 1));
    mbarrier_wait(pipeline.full + 8 * state.stage, state.phase);
    const uint32_t x_from = consumer_x + state.stage * Shape::kStageBytes;
    const uint64_t w = descriptor_of(w_from + state.stage * (Shape::kStageBytes >> 4));
    uint32_t prefetched[4][4], a[2][2][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) ldmatrix_x4(prefetched[k], x_from ^ (32 * k));
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t (&from)[4] = prefetched[2 * part + k];
        const BlockFactors& block_factors = factors[(2 * part + k) * 32 / kBlock];
        a[part][k][0] = block_factors.template apply<0>(from[0]),
        a[part][k][1] = block_factors.template apply<1>(from[1]);
        a[part][k][2] = block_factors.template apply<0>(from[2]),
        a[part][k][3] = block_factors.template apply<1>(from[3]);
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 2; ++k)
        wgmma_rs(c, a[part][k], advance_descriptor(w, (2 * part + k) * 32), step + part + k > 0);
      wgmma_commit();
      wgmma_wait<1>();  // the half before this one
      if (part == 0 && step > 0) pipeline.has_read(last_stage, lane);
    }
    committed(step);
    last_stage = state.stage;
    state.advance();
  }
  return last_stage;
}

}  // namespace embert::sm90
