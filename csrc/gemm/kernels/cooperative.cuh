// The cooperative GEMM: y[rows, out] = x[rows, in] · W[out, in]ᵀ + bias (+ residual) on Hopper for many rows, where
// there is a residual (attention out, FFN out) or K is long and no activation follows.
//
// The consumers, two or three, share one tile of 128 or 256 columns, 64 rows each. The others are a few steps behind
// the first, so that the epilogue of one overlaps with the products of another. A wide tile reads less shared memory
// per product than two narrow ones in ping-pong (pingpong.cuh), which pays where K is long. The smaller tiles are for
// batches that fill the multiprocessors better with them, for all rows or for the last ones (heuristics.h).
//
// K is accumulated in order in one FP32 accumulator, so a row's bits depend only on the row and the weights. The
// residual comes through the pipeline too, as one or two more steps after those of K.
//
// LayerNorms are folded in (EPILOGUES.md): the epilogue makes (1/σ, −μ/σ) from the row statistics, applies 1/σ to the
// product (the LayerNorm of x) or both to the residual, and writes the statistics of its rows for the next GEMM.
#pragma once

#include "common/barrier.cuh"
#include "common/launch.cuh"
#include "common/shared_memory.cuh"
#include "common/warp.cuh"
#include "gemm/epilogue/finish.cuh"
#include "gemm/epilogue/row_stats.cuh"
#include "gemm/mainloop/int8_aligned.cuh"
#include "gemm/mainloop/pipeline.cuh"

namespace embert::sm90 {

template <int kColumnsValue, int kStagesValue, int kConsumersValue = 2>
struct CooperativeShape : StageShape<kColumnsValue, kConsumersValue> {
  using Stage = StageShape<kColumnsValue, kConsumersValue>;
  static constexpr int kStages = kStagesValue;
  static constexpr int kBoxes = 2;  // staging boxes of a consumer
  // A consumer's constants of 128 columns, and the next LayerNorm's gammas.
  static constexpr int kPairBytes = kStatColumns * 8, kColumnBytes = kPairBytes + kStatColumns * 2;
  static constexpr int kStaging = kStages * Stage::kStageBytes;
  static constexpr int kConstants = kStaging + Stage::kConsumers * kBoxes * kBoxBytes;
  static constexpr int kFull = kConstants + Stage::kConsumers * kColumnBytes;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kStarted = kEmpty + 8 * kStages;
  static constexpr int kSharedBytes = kStarted + 8;
  // Columns of the residual in a pipeline step: as many as fit a stage; 64 columns take kRows · 128 bytes.
  static constexpr int kResidualColumns = Stage::kStageBytes / (Stage::kRows * 128) >= 2 ? 128 : 64;

  // Registers per thread, of the 65 536 of a multiprocessor.
  static constexpr int kProducerRegisters = Stage::kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = Stage::kConsumers == 2 ? 232 : 152;

  // True if tiles of half the columns are possible with a residual: they too need whole groups of row statistics.
  static constexpr bool kNarrows = kColumnsValue == 2 * kStatColumns;

  static_assert(kColumnsValue == 128 || kColumnsValue == 256, "the widths that common/mma.cuh wraps");
  static_assert(kSharedBytes <= kSharedLimit, "the limit of a block");
};

// With the number of stages that fits.
using Cooperative256 = CooperativeShape<256, 4>;
using Cooperative128 = CooperativeShape<128, 6>;
using Cooperative192x128 = CooperativeShape<128, 4, 3>;

// Selects one of two arrays.
template <bool kFirst, typename A, typename B>
__device__ __forceinline__ const auto& select_array(const A& first, const B& second) {
  if constexpr (kFirst)
    return first;
  else
    return second;
}

constexpr int kLag = 2;  // steps between the first consumer and the others

// The tile scheduler with narrow tiles: only the first `full_rows` rows of tiles are whole, the others half as wide.
// Narrow tiles are dealt out last and shorten a last wave that would leave half of the multiprocessors idle. For
// example, 26 361 rows of 1 024 columns are 412 tiles for 66 clusters, 6.24 waves. With narrow tiles a forward pass of
// BERT-large takes 2 to 3 % less time.
template <typename Shape>
struct NarrowingTileScheduler : TileScheduler<Shape> {
  int full_rows, full_tiles;  // in rows of tiles, in tiles

  __device__ __forceinline__ NarrowingTileScheduler(const GemmArguments& args, int full_rows)
      : TileScheduler<Shape>(args), full_rows(full_rows), full_tiles(full_rows * this->columns) {
    this->end += this->end - full_tiles;
  }
  __device__ __forceinline__ int row_of(int tile) const {
    const int tile_row = tile_row_of(tile) + (tile < full_tiles ? 0 : full_rows);
    return ((this->backwards ? this->rows - 1 - tile_row : tile_row) * kCluster + this->rank) * Shape::kRows;
  }
  __device__ __forceinline__ int column_of(int tile) const {
    const int across = tile < full_tiles ? this->columns : 2 * this->columns;
    return ((tile < full_tiles ? tile : tile - full_tiles) - tile_row_of(tile) * across) * columns_of(tile);
  }
  __device__ __forceinline__ int columns_of(int tile) const {
    return tile < full_tiles ? Shape::kColumns : Shape::kColumns / 2;
  }

 private:
  // The row of a tile among tiles of the same width.
  __device__ __forceinline__ int tile_row_of(int tile) const {
    return this->row_tile(tile < full_tiles ? tile : (tile - full_tiles) / 2);
  }
};

// Runs a block. With int8 operands, sums are dequantized, 128 columns at a time, before the epilogue of 16-bit
// operands: the columns' scales pass through the memory that holds the constants afterwards.
template <typename T, typename Shape, bool kResidual, bool kPrescaledRows, int kBlock = 0>
__device__ __forceinline__ void cooperative_tiles(const CUtensorMap& x_map, const CUtensorMap& w_map,
                                                  const CUtensorMap& narrow_w_map, const CUtensorMap& residual_map,
                                                  const CUtensorMap& y_map, const GemmArguments& args, int full_rows,
                                                  const DequantScales& scales) {
  constexpr bool kInt8Operands = std::is_same_v<T, int8_t>;
  using Out = RowType<T>;
  constexpr bool kNarrows = kResidual && Shape::kNarrows;
  using Scheduler = std::conditional_t<kNarrows, NarrowingTileScheduler<Shape>, TileScheduler<Shape>>;
  extern __shared__ __align__(1024) uint8_t smem[];  // a swizzle pattern is 1 024 bytes
  const uint32_t base = shared_address(smem);
  const Pipeline pipeline{base, base + Shape::kFull, base + Shape::kEmpty};
  const uint32_t started = base + Shape::kStarted;  // an mbarrier: the first consumer's first steps are in flight
  const int group = warp_index() / 4;

  if (threadIdx.x == 32) prefetch_tensor_maps(x_map, w_map, narrow_w_map, residual_map, y_map);
  if (threadIdx.x == 0) {
    pipeline.init(Shape::kStages, 4 * Shape::kConsumers);
    mbarrier_init(started, 4);
    fence_mbarrier_init();
  }
  griddepcontrol_launch_dependents();
  wait_for_cluster_init();

  const int rows = args.m;
  const int steps = (args.k + kDepthOf<T> - 1) / kDepthOf<T>;
  const Scheduler tiles(args, full_rows);

  if (group == 0) {
    warpgroup_reg_dealloc<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) {
      TmaProducer<Shape, Scheduler, kDepthOf<T>> producer(pipeline, tiles, steps, x_map, w_map, narrow_w_map);
      for (int tile = tiles.first; tile < tiles.end; tile += tiles.stride) {
        producer.copy(tile);
        const int columns = kResidual ? tiles.columns_of(tile) : 0;
        for (int from = 0; from < columns; from += Shape::kResidualColumns) {
          producer.copy_boxes(residual_map, Shape::kResidualColumns / 64, tiles.row_of(tile),
                              tiles.column_of(tile) + from);
        }
      }
      producer.wait_all_read();
    }
  } else {
    warpgroup_reg_alloc<Shape::kConsumerRegisters>();
    const int consumer = group - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int consumer_row = consumer * 64;  // in the block's tile
    const uint32_t staging = base + Shape::kStaging + consumer * Shape::kBoxes * kBoxBytes;
    constexpr bool kNext = kResidual && kPrescaledRows;
    using Pair = ColumnPair<kResidual, kPrescaledRows>;
    uint8_t* const constants = smem + Shape::kConstants + consumer * Shape::kColumnBytes;
    Pair* const columns = reinterpret_cast<Pair*>(constants);
    uint32_t* const next_gammas_smem = reinterpret_cast<uint32_t*>(constants + Shape::kPairBytes);
    PipelineState<Shape::kStages> state{0, 0};
    uint32_t boxes = 0;  // staged so far
    for (int tile = tiles.first; tile < tiles.end; tile += tiles.stride) {
      const int row = tiles.row_of(tile) + consumer_row, column = tiles.column_of(tile);
      const int tile_columns = tiles.columns_of(tile);

      // Loads for the epilogue start here: the columns' constants (two columns a thread) and the row statistics.
      Pair thread_columns = {};
      uint32_t thread_next_gamma = 0;
      if (thread < tile_columns / 2) {
        thread_columns = __ldg(column_pairs<kResidual, kPrescaledRows>(args) + column / 2 + thread);
        if constexpr (kNext) thread_next_gamma = __ldg(next_gamma_pairs(args) + column / 2 + thread);
      }
      const int first_row = row + warp * 16 + lane / 4;
      if ((kInt8Operands || args.row_stats != nullptr) && tile == tiles.first) griddepcontrol_wait();
      RowStats row_stats;
      if (args.row_stats != nullptr) row_stats.load(args, row + warp * 16, lane);
      float2 column_scales = {}, x_scales = {};
      if constexpr (kInt8Operands) {
        if (thread < tile_columns / 2) column_scales = __ldg(scales.columns + column / 2 + thread);
        if constexpr (kBlock == 0) {
          XScales<0> x_dequant;
          x_dequant.read(args, scales, first_row, lane);
          x_scales = x_dequant.of_rows();
        }
      }

      SumOf<T> products[Shape::kColumns / 2];
      if (consumer > 0 && tile == tiles.first) mbarrier_wait(started, 0);
      uint32_t last_stage = state.stage;
      const auto multiply_steps = [&](auto width) {
        auto& part = reinterpret_cast<SumOf<T>(&)[1][decltype(width)::value / 2]>(products);
        if constexpr (kBlock > 0) {
          const int last_lag_step = tile == tiles.first && consumer == 0 && lane == 0 ? min(kLag, steps) - 1 : -1;
          XScales<kBlock> x_dequant;
          x_dequant.read(args, scales, first_row, lane);
          const auto committed = [&](int step) {
            if (step == last_lag_step) mbarrier_arrive(started);
          };
          last_stage = mainloop_aligned<kBlock, Shape>(pipeline, state, steps, consumer_row, warp, lane, x_dequant,
                                                       part[0], committed);
          x_scales = x_dequant.of_rows();
        } else {
          const auto committed = [&](int step) {
            if (tile == tiles.first && consumer == 0 && step == min(kLag, steps) - 1 && lane == 0)
              mbarrier_arrive(started);
          };
          last_stage = mainloop<T, Shape>(pipeline, state, steps, consumer_row, lane, part, committed);
        }
      };
      if (tile_columns == Shape::kColumns) {
        multiply_steps(std::integral_constant<int, Shape::kColumns>());
      } else if constexpr (kNarrows) {
        multiply_steps(std::integral_constant<int, Shape::kColumns / 2>());
      }
      wgmma_wait_all(products);
      pipeline.has_read(last_stage, lane);

      // The epilogue, 64 rows and 16 columns at a time.
      float2 scale[2];
      scale[0] = scale[1] = unnormed<kResidual, kPrescaledRows>(1.0f);
      if (args.row_stats != nullptr) row_stats.scales(args, 1.0f, lane, scale);
      constexpr int kChunks = kStatColumns / 16;
#pragma unroll
      for (int part = 0; part < Shape::kColumns / kStatColumns; ++part) {
        if (kNarrows && part * kStatColumns == tile_columns) break;
        float scaled[kInt8Operands ? kStatColumns / 2 : 1];
        if constexpr (kInt8Operands) {
          float2* const part_scales = reinterpret_cast<float2*>(constants);
          named_barrier_sync(kConsumerBarrier + consumer, 128);  // all threads have read the previous columns
          if (thread / 64 == part) part_scales[thread % 64] = column_scales;
          named_barrier_sync(kConsumerBarrier + consumer, 128);
          dequantize_tile(products + part * kStatColumns / 2, x_scales, part_scales, lane, scaled);
        }
        const auto& c = select_array<kInt8Operands>(scaled, products);
        float2 sums[2][kChunks];
#pragma unroll
        for (int in_part = 0; in_part < kChunks; ++in_part) {
          const int chunk = part * kChunks + in_part;
          if (kResidual && chunk % (Shape::kResidualColumns / 16) == 0) {
            mbarrier_wait(pipeline.full + 8 * state.stage, state.phase);
            last_stage = state.stage;
            state.advance();
          }
          const uint32_t box_at = staging + boxes % Shape::kBoxes * kBoxBytes;
          const int in_box = 2 * (chunk % 4) + lane / 16;  // 8 columns
          if (in_part == 0) {
            named_barrier_sync(kConsumerBarrier + consumer, 128);  // all threads have read the previous columns
            if (thread / 64 == part) {
              columns[thread % 64] = thread_columns;
              if constexpr (kNext) next_gammas_smem[thread % 64] = thread_next_gamma;
            }
            named_barrier_sync(kConsumerBarrier + consumer, 128);
          }
          if (chunk % 4 == 0) wait_for_box<Shape::kBoxes - 1>(lane);
          const Pair column_constants[2] = {columns[in_part * 8 + lane % 4], columns[in_part * 8 + lane % 4 + 4]};
          uint32_t next_gammas[2] = {};
          if constexpr (kNext) {
            next_gammas[0] = next_gammas_smem[in_part * 8 + lane % 4];
            next_gammas[1] = next_gammas_smem[in_part * 8 + lane % 4 + 4];
          }
          uint32_t residuals[4] = {};
          if constexpr (kResidual) {
            const int residual_box = chunk % (Shape::kResidualColumns / 16) / 4;
            ldmatrix_x4(residuals, base + last_stage * Shape::kStageBytes + residual_box * Shape::kRows * 128 +
                                       swizzle_128b(consumer_row + warp * 16 + lane % 16, in_box));
          }
          // The four registers of an m16n16: (rows 0-7, columns 0-7), (rows 8-15, columns 0-7), then columns 8-15.
          uint32_t packed[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int element = 8 * (kInt8Operands ? in_part : chunk) + 4 * (i / 2) + 2 * (i % 2);
            packed[i] = finish<Out, Activation::kNone, kResidual, kPrescaledRows>(
                c[element], c[element + 1], column_constants[i / 2], scale[i % 2], residuals[i], next_gammas[i / 2],
                i < 2, sums[i % 2][in_part]);
          }
          stmatrix_x4(box_at + swizzle_128b(warp * 16 + lane % 16, in_box), packed);
          if (chunk % 4 == 3) {
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) {  // not store_box: tiles of 256 columns would be scheduled in another order
              tma_store(&y_map, box_at + warp * 16 * 128, column + chunk / 4 * 64, row + warp * 16);
              tma_store_commit();
            }
            ++boxes;
          }
          if (kResidual && (chunk + 1) % (Shape::kResidualColumns / 16) == 0) pipeline.has_read(last_stage, lane);
        }
        if (kResidual && args.y_stats != nullptr)
          store_row_stats<kStatColumns>(args, sums, rows, first_row, column + part * kStatColumns, lane);
      }
    }
    if (lane == 0)
      tma_store_wait_read<0>();  // before the block exits and its shared memory is freed; the end of the grid waits for
                                 // the writes
  }
}

template <typename T, typename Shape, bool kResidual, bool kPrescaledRows>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    cooperative_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                       const __grid_constant__ CUtensorMap narrow_w_map,
                       const __grid_constant__ CUtensorMap residual_map, const __grid_constant__ CUtensorMap y_map,
                       const GemmArguments args, int full_rows) {
  EMBERT_SM90A("cooperative_kernel", cooperative_tiles<T, Shape, kResidual, kPrescaledRows>(
                                         x_map, w_map, narrow_w_map, residual_map, y_map, args, full_rows, {}));
}

// With a residual, and x and W in int8. kBlock: columns of x's blocks (ops/blocks.cuh); 0: one scale per row of x.
template <typename Shape, int kBlock>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    cooperative_int8_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                            const __grid_constant__ CUtensorMap narrow_w_map,
                            const __grid_constant__ CUtensorMap residual_map, const __grid_constant__ CUtensorMap y_map,
                            const GemmArguments args, int full_rows, const DequantScales scales) {
  EMBERT_SM90A("cooperative_int8_kernel",
               cooperative_tiles<int8_t, Shape, true, false, kBlock>(x_map, w_map, narrow_w_map, residual_map, y_map,
                                                                     args, full_rows, scales));
}

}  // namespace embert::sm90
