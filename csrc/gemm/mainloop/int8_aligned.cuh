// The main loop for x quantized in blocks (ops/blocks.cuh). The int8 values of a block are rescaled to the scale of
// their row on the way from shared memory to registers, from which wgmma takes its left operand. This overlaps with
// the products of the previous step.
#pragma once

#include "common/shared_memory.cuh"
#include "common/warp.cuh"
#include "gemm/mainloop/pipeline.cuh"
#include "ops/blocks.cuh"

namespace embert::hopper {

// The block maxima of two rows: those of a lane's accumulators of m16n8.
template <int kBlock>
class BlockMaxima {
 public:
  static constexpr int kOfStep = kDepthOf<int8_t> / kBlock;  // blocks in a step

  BlockMaxima() = default;
  // Rows past the end are read as the last row.
  __device__ __forceinline__ BlockMaxima(const void* maxima, int row, int rows, int blocks)
      : first_(static_cast<const uint16_t*>(maxima) + min(row, rows - 1) * blocks),
        second_(static_cast<const uint16_t*>(maxima) + min(row + 8, rows - 1) * blocks) {}

  // The row maximum of each of the two rows.
  __device__ __forceinline__ __half2 largest(int blocks, int lane) const {
    __half2 most = as_half2(0);
    for (int i = lane % 4; i < blocks; i += 4) most = __hmax2_nan(most, as_half2(pair(first_[i], second_[i])));
    return larger_of_row(most);
  }
  // Starts the loads of a step's maxima, for `factors`.
  __device__ __forceinline__ void ask(int step) {
    if constexpr (kOfStep == 2) {
      asked_[0] = reinterpret_cast<const uint32_t*>(first_)[step];
      asked_[1] = reinterpret_cast<const uint32_t*>(second_)[step];
    } else {
      asked_[0] = first_[step], asked_[1] = second_[step];
    }
  }
  __device__ __forceinline__ BlockFactors factors(int block_of_step, float2 inverses) const {
    const uint32_t both = block_of_step == 0 ? pair(asked_[0], asked_[1]) : __byte_perm(asked_[0], asked_[1], 0x7632);
    return {as_half2(both), inverses};
  }

 private:
  static __device__ __forceinline__ uint32_t pair(uint32_t first, uint32_t second) {
    return __byte_perm(first, second, 0x5410);
  }
  const uint16_t *first_, *second_;
  uint32_t asked_[2];
};

// What dequantizes a lane's sums of two rows of x: the rows' scales, or the maxima of their blocks (kBlock columns,
// if there are blocks).
template <int kBlock>
struct XScales {
  BlockMaxima<kBlock> maxima;
  __half2 largest;
  float2 inverses;

  __device__ __forceinline__ void read(const GemmArguments& args, const ProductScales& scales, int first_row,
                                       int lane) {
    const int blocks = args.k / kBlock;
    maxima = {scales.maxima, first_row, args.m, blocks};
    maxima.ask(0);
    largest = maxima.largest(blocks, lane);
    inverses = row_inverses_of(largest);
  }
  __device__ __forceinline__ float2 of_rows() const { return row_scales_of<kBlock>(largest); }
};
template <>
struct XScales<0> {
  float2 scales;

  __device__ __forceinline__ void read(const GemmArguments& args, const ProductScales& from, int first_row, int) {
    scales = {from.rows[min(first_row, args.m - 1)], from.rows[min(first_row + 8, args.m - 1)]};
  }
  __device__ __forceinline__ float2 of_rows() const { return scales; }
};

// The main loop (pipeline.cuh) for 64 rows of such an x. `of_x` has been read. Half a step is multiplied while the
// next half is rescaled: 16 registers hold both.
//
// While wgmma runs, a warp issues one instruction in four cycles or more, and a step of both consumers takes 1 024
// cycles. So the code around the rescaling is short: addresses that the compiler would recompute stay in registers.
template <int kBlock, typename Shape, int kElements, typename Committed>
__device__ __forceinline__ uint32_t mainloop_aligned(const Pipeline& pipeline, PipelineState<Shape::kStages>& at,
                                                     int steps, int own_row, int warp, int lane, XScales<kBlock>& of_x,
                                                     int (&c)[kElements], const Committed& committed) {
  using Maxima = BlockMaxima<kBlock>;
  // Read from lane 0, so that wgmma's operands stay in uniform registers (common/warp.cuh).
  at = {__shfl_sync(~0u, at.stage, 0), __shfl_sync(~0u, at.phase, 0)};
  uint32_t last_stage = at.stage;
  // The lane's part of the first stage. The address 32 columns further differs by an exclusive or with 32.
  uint32_t own_x = pipeline.base + (own_row + warp * 16) * 128 + swizzled(lane % 16, lane / 16);
  uint32_t w_from = uint32_t(operand(pipeline.base + Shape::kXBytes));
  keep(own_x), keep(w_from);
  for (int step = 0; step < steps; ++step) {
    BlockFactors factors[Maxima::kOfStep];
#pragma unroll
    for (int i = 0; i < Maxima::kOfStep; ++i) factors[i] = of_x.maxima.factors(i, of_x.inverses);
    of_x.maxima.ask(min(step + 1, steps - 1));
    wait_barrier(pipeline.full + 8 * at.stage, at.phase);
    const uint32_t x_from = own_x + at.stage * Shape::kStageBytes;
    const uint64_t w = operand_of(w_from + at.stage * (Shape::kStageBytes >> 4));
    uint32_t asked[4][4], a[2][2][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) load_matrices(asked[k], x_from ^ (32 * k));
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t (&from)[4] = asked[2 * part + k];
        const BlockFactors& by = factors[(2 * part + k) * 32 / kBlock];
        a[part][k][0] = by.template apply<0>(from[0]), a[part][k][1] = by.template apply<1>(from[1]);
        a[part][k][2] = by.template apply<0>(from[2]), a[part][k][3] = by.template apply<1>(from[3]);
      }
      fence_registers();
#pragma unroll
      for (int k = 0; k < 2; ++k) multiply_held(c, a[part][k], further(w, (2 * part + k) * 32), step + part + k > 0);
      commit_products();
      wait_products<1>();  // the half before this one
      if (part == 0 && step > 0) pipeline.has_read(last_stage, lane);
    }
    committed(step);
    last_stage = at.stage;
    at.advance();
  }
  return last_stage;
}

}  // namespace embert::hopper
