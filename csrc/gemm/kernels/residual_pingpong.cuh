// The ping-pong GEMM with a residual: y[rows, out] = x[rows, in] · W[out, in]ᵀ + bias + residual with x and W in int8,
// on Hopper for many rows: attention out where y has whole tiles of 256 columns.
//
// Two consumers have a tile of 64 × 256 each: one multiplies during the other's epilogue. With 16 bits the main loop
// takes so long that the exposed epilogue of cooperative.cuh's larger tiles costs less than the additional loads of
// smaller tiles. With int8 the main loop takes half as long, and the epilogue as long as before: attention out of
// BERT-large takes 47 µs in cooperative.cuh for 16 384 rows, and would take 24 at the rate of QKV. Where K is long,
// cooperative.cuh is still faster.
//
// A consumer's staging memory holds its whole tile of y. The residual is loaded there while the tile is multiplied, and
// y replaces it. Each warp loads its own 16 rows, so warps wait for each other only for the columns' constants.
#pragma once

#include "common/barrier.cuh"
#include "common/launch.cuh"
#include "common/shared_memory.cuh"
#include "gemm/epilogue/finish.cuh"
#include "gemm/epilogue/row_stats.cuh"
#include "gemm/mainloop/int8_aligned.cuh"
#include "gemm/mainloop/pingpong.cuh"

namespace embert::sm90 {

struct ResidualPingPongShape : StageShape<256, 1> {
  static constexpr int kThreads = 3 * 128;             // a producer warp group and two consumers
  static constexpr int kStages = 4;                    // as many as fit
  static constexpr int kBoxes = kColumns / 64;         // staging boxes of a consumer
  static constexpr int kPairBytes = kStatColumns * 8;  // constants of 128 columns of a consumer
  static constexpr int kWarpBoxBytes = 16 * 128;       // a warp's part of a box of 64 rows
  static constexpr int kStaging = kStages * kStageBytes;
  static constexpr int kConstants = kStaging + 2 * kBoxes * kBoxBytes;
  static constexpr int kFull = kConstants + 2 * kPairBytes;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kOrder = kEmpty + 8 * kStages;
  static constexpr int kResidual = kOrder + 2 * 8;  // an mbarrier for each warp: its residual has arrived
  static constexpr int kSharedBytes = kResidual + 8 * 8;
  static_assert(kSharedBytes <= kSharedLimit, "the limit of a block");

  template <bool kPingPong>
  static constexpr int kConsumerRows = kRows;
};

// The epilogue of a consumer (pingpong.cuh). kBlock: columns of x's blocks (ops/blocks.cuh); 0: one scale per row of x.
template <int kBlock>
class ResidualEpilogue {
  using Shape = ResidualPingPongShape;
  using Pair = ColumnPair<true, false>;
  using Sums = int[1][Shape::kColumns / 2];

 public:
  __device__ __forceinline__ ResidualEpilogue(uint8_t* smem, const GemmArguments& args, const DequantScales& scales,
                                              const TileScheduler<Shape>& tiles, const CUtensorMap& residual_map,
                                              const CUtensorMap& y_map, int consumer)
      : args_(args), scales_(scales), tiles_(tiles), residual_map_(residual_map), y_map_(y_map), consumer_(consumer) {
    thread_ = threadIdx.x % 128, warp_ = thread_ / 32, lane_ = thread_ % 32;
    constants_ = smem + Shape::kConstants + consumer * Shape::kPairBytes;
    staging_ = shared_address(smem) + Shape::kStaging + consumer * Shape::kBoxes * kBoxBytes;
    residual_there_ = shared_address(smem) + Shape::kResidual + 8 * (4 * consumer + warp_);
  }

  __device__ __forceinline__ void first(int /* tile */) const { griddepcontrol_wait(); }

  // Loads for the epilogue, in flight during the products: constants of two columns a thread, and the rows' scales.
  __device__ __forceinline__ void before(int tile) {
    row_ = tiles_.row_of(tile) + warp_ * 16, column_ = tiles_.column_of(tile);
    thread_columns_ = __ldg(column_pairs<true, false>(args_) + column_ / 2 + thread_);
    column_scales_ = __ldg(scales_.columns + column_ / 2 + thread_);
    RowStats row_stats;
    row_stats.load(args_, row_, lane_);
    x_scales_.read(args_, scales_, row_ + lane_ / 4, lane_);
    row_stats.scales(args_, 1.0f, lane_, residual_scales_);
  }

  template <typename T, typename S>
  __device__ __forceinline__ uint32_t multiply(const Pipeline& pipeline, PipelineState<S::kStages>& state, int steps,
                                               int consumer_row, int lane, Sums& c) {
    // After products are in flight: by then the stores of the previous tile have read the staging memory.
    const auto committed = [&](int step) {
      if (step > 0) return;
      if (lane == 0) {
        tma_store_wait_read<0>();
        mbarrier_arrive_expect_tx(residual_there_, S::kBoxes * S::kWarpBoxBytes);
#pragma unroll
        for (int box = 0; box < S::kBoxes; ++box)
          tma_load_evict_first(&residual_map_, staging_ + box * kBoxBytes + warp_ * S::kWarpBoxBytes, residual_there_,
                               column_ + box * 64, row_);
      }
      __syncwarp();
    };
    if constexpr (kBlock > 0) {
      return mainloop_aligned<kBlock, S>(pipeline, state, steps, consumer_row, warp_, lane, x_scales_, c[0], committed);
    } else {
      return mainloop<T, S>(pipeline, state, steps, consumer_row, lane, c, committed);
    }
  }

  __device__ __forceinline__ void after(const Sums& c, int order, int /* next */) {
    Pair* const columns = reinterpret_cast<Pair*>(constants_);
    float2* const part_scales = reinterpret_cast<float2*>(constants_);  // scales pass through the same memory
    const int first_row = row_ + lane_ / 4;
    const float2 x_scales = x_scales_.of_rows();
    mbarrier_wait(residual_there_, order & 1);
    constexpr int kChunks = kStatColumns / 16;
#pragma unroll
    for (int part = 0; part < Shape::kColumns / kStatColumns; ++part) {
      named_barrier_sync(kConsumerBarrier + consumer_, 128);  // all threads have read the previous columns
      if (thread_ / 64 == part) part_scales[thread_ % 64] = column_scales_;
      named_barrier_sync(kConsumerBarrier + consumer_, 128);
      float scaled[kStatColumns / 2];
      dequantize_tile(c[0] + part * kStatColumns / 2, x_scales, part_scales, lane_, scaled);
      named_barrier_sync(kConsumerBarrier + consumer_, 128);
      if (thread_ / 64 == part) columns[thread_ % 64] = thread_columns_;
      named_barrier_sync(kConsumerBarrier + consumer_, 128);
      float2 sums[2][kChunks];
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {  // 16 columns
        const Pair column_constants[2] = {columns[chunk * 8 + lane_ % 4], columns[chunk * 8 + lane_ % 4 + 4]};
        const uint32_t place = staging_ + (2 * part + chunk / 4) * kBoxBytes +
                               swizzle_128b(warp_ * 16 + lane_ % 16, 2 * (chunk % 4) + lane_ / 16);
        uint32_t residuals[4], packed[4];
        ldmatrix_x4(residuals, place);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int element = 8 * chunk + 4 * (i / 2) + 2 * (i % 2);
          packed[i] = finish<half_t, Activation::kNone, true, false>(scaled[element], scaled[element + 1],
                                                                     column_constants[i / 2], residual_scales_[i % 2],
                                                                     residuals[i], 0, i < 2, sums[i % 2][chunk]);
        }
        stmatrix_x4(place, packed);
      }
      store_boxes<2>(y_map_, staging_ + 2 * part * kBoxBytes + warp_ * Shape::kWarpBoxBytes, kBoxBytes,
                     column_ + part * 128, 64, row_, 0, lane_);
      store_row_stats<kStatColumns>(args_, sums, args_.m, first_row, column_ + part * kStatColumns, lane_);
    }
  }

  __device__ __forceinline__ void last() const {
    if (lane_ == 0) tma_store_wait_read<0>();  // before the block's shared memory is freed
  }

 private:
  const GemmArguments& args_;
  const DequantScales& scales_;
  const TileScheduler<Shape>& tiles_;
  const CUtensorMap &residual_map_, &y_map_;
  int consumer_, thread_, warp_, lane_;
  int row_, column_;  // of this warp, in the current tile
  uint32_t residual_there_, staging_;
  uint8_t* constants_;
  Pair thread_columns_;
  float2 column_scales_;
  float2 residual_scales_[2];
  XScales<kBlock> x_scales_;
};

template <int kBlock>
__global__ void __launch_bounds__(ResidualPingPongShape::kThreads, 1)
    residual_pingpong_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                             const __grid_constant__ CUtensorMap residual_map,
                             const __grid_constant__ CUtensorMap y_map, const GemmArguments args,
                             const DequantScales scales) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = ResidualPingPongShape;
  extern __shared__ __align__(1024) uint8_t smem[];  // a swizzle pattern is 1 024 bytes
  const uint32_t base = shared_address(smem);
  if (threadIdx.x == 32) prefetch_tensor_maps(x_map, w_map, residual_map, y_map);
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < 8; ++warp) mbarrier_init(base + Shape::kResidual + 8 * warp, 1);
  }
  init_pingpong<true, Shape>(base);
  const TileScheduler<Shape> tiles(args);
  pingpong_mainloop<int8_t, true, Shape>(base, tiles, args.k, x_map, w_map, [&](int consumer, int) {
    return ResidualEpilogue<kBlock>(smem, args, scales, tiles, residual_map, y_map, consumer);
  });
#else
  EMBERT_TRAP("residual_pingpong_kernel");
#endif
}

}  // namespace embert::sm90
