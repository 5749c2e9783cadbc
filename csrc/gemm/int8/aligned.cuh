// The main loop for x in blocks of 8 bits (norm/blocks.cuh): integers of a block become those of their row's scale on
// the way from shared memory to registers, from which wgmma takes its left operand. They do so while the step before is
// multiplied.
#pragma once

#include "gemm/loops/ring.cuh"
#include "norm/blocks.cuh"
#include "ptx/shared_memory.cuh"

namespace embert::hopper {

// The maxima of two rows' blocks: those of a lane's accumulators of m16n8.
class BlockMaxima {
 public:
  // Rows past the end are read as the last row.
  __device__ __forceinline__ BlockMaxima(const void* maxima, int row, int rows, int blocks, int lane)
      : maxima_(static_cast<const half_t*>(maxima)),
        first_(min(row, rows - 1) * blocks),
        second_(min(row + 8, rows - 1) * blocks) {
    largest_ = as_half2(0);
    for (int i = lane % 4; i < blocks; i += 4) largest_ = __hmax2_nan(largest_, load(i));
    largest_ = larger_of_row(largest_);
    inverse_ = {row_inverse_of(__low2float(largest_)), row_inverse_of(__high2float(largest_))};
  }
  __device__ __forceinline__ __half2 load(int block) const {
    return __halves2half2(maxima_[first_ + block], maxima_[second_ + block]);
  }
  __device__ __forceinline__ BlockFactor factor(__half2 maxima, int row) const {
    return row == 0 ? BlockFactor(__low2float(maxima), inverse_.x) : BlockFactor(__high2float(maxima), inverse_.y);
  }
  template <int kBlock>
  __device__ __forceinline__ float2 row_scales() const {
    return {row_scale_of<kBlock>(__low2float(largest_)), row_scale_of<kBlock>(__high2float(largest_))};
  }

 private:
  const half_t* maxima_;
  int first_, second_;
  __half2 largest_;
  float2 inverse_;
};

// multiply_tile (ring.cuh) for 64 rows of such an x. Half a step is multiplied while the next half is turned: 16
// registers hold both.
template <int kBlock, typename Shape, int kElements, typename Committed>
__device__ __forceinline__ uint32_t multiply_aligned(const Ring& ring, RingPlace<Shape::kStages>& at, int steps,
                                                     int own_row, int warp, int lane, const BlockMaxima& maxima,
                                                     int (&c)[kElements], const Committed& committed) {
  constexpr int kBlocks = kDepthOf<int8_t> / kBlock;  // of a step
  uint32_t last_stage = at.stage;
  __half2 next[kBlocks];
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) next[i] = maxima.load(i);
  for (int step = 0; step < steps; ++step) {
    BlockFactor factors[kBlocks][2];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      factors[i][0] = maxima.factor(next[i], 0), factors[i][1] = maxima.factor(next[i], 1);
      next[i] = maxima.load(min(step + 1, steps - 1) * kBlocks + i);
    }
    wait_barrier(ring.full + 8 * at.stage, at.phase);
    const uint32_t x_from = ring.base + at.stage * Shape::kStageBytes + (own_row + warp * 16) * 128;
    const uint32_t w_from = ring.base + at.stage * Shape::kStageBytes + Shape::kXBytes;
    uint32_t asked[4][4], a[2][2][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) load_matrices(asked[k], x_from + swizzled(lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int k = 2 * part + i / 4;  // 32 columns
        a[part][i / 4][i % 4] = factors[k * 32 / kBlock][i % 2].apply(asked[k][i % 4]);
      }
      fence_registers();
#pragma unroll
      for (int k = 0; k < 2; ++k)
        multiply_held(c, a[part][k], further(operand(w_from), (2 * part + k) * 32), step + part + k > 0);
      commit_products();
      wait_products<1>();  // the half before this one
      if (part == 0 && step > 0) ring.has_read(last_stage, lane);
    }
    committed(step);
    last_stage = at.stage;
    at.advance();
  }
  return last_stage;
}

}  // namespace embert::hopper
