// y[rows, out] = activation(x[rows, in] · W[out, in]ᵀ + bias (+ residual)) on Hopper, top to bottom.
//
// Persistent blocks of three warpgroups. The first copies tiles of x and W into a ring of stages; the other two
// multiply 64 rows each of one tile of 128 rows and finish them. The second is a few steps behind the first: one
// finishes while the other still has, or has again, something to multiply. hopper_few.cuh is for few rows.
//
// Blocks of a cluster lie below each other in y and share the tile of W: each fetches its part and multicasts it.
// Accumulation walks K in order in one FP32 accumulator: a row's bits depend on nothing but the row and the weights.
// The residual comes through the ring too, as one or two more steps after those of K.
//
// LayerNorms are folded in (../EPILOGUES.md): the epilogue turns the sums of its rows into (1/σ, −μ/σ), applies them to
// the product (its input's LayerNorm) or to the residual, and leaves the sums of its own rows for the next product.
#pragma once

#include "hopper_epilogue.cuh"

namespace embert::hopper {

constexpr int kBoxBytes = 64 * 128;  // 64 rows of 64 columns: what wgmma's M and a swizzled row make

template <int kColumnsValue, int kStagesValue>
struct TileShape {
  static constexpr int kRows = 128;               // of x, a block's tile; a consumer has 64, which is wgmma's M
  static constexpr int kColumns = kColumnsValue;  // of y
  static constexpr int kCluster = 2;              // blocks that share W's tile
  static constexpr int kStages = kStagesValue;
  static constexpr int kBoxes = 2;   // of staging memory, a consumer
  static constexpr int kDepth = 64;  // of K, a stage: 128 bytes, one swizzled row
  static constexpr int kXBytes = kRows * kDepth * 2;
  static constexpr int kWBytes = kColumns * kDepth * 2;
  static constexpr int kStageBytes = kXBytes + kWBytes;
  static constexpr int kWShare = kColumns / kCluster;   // rows of W a block fetches
  static constexpr int kColumnBytes = kSumColumns * 8;  // a consumer's constants of 128 columns
  static constexpr int kBarrierBytes = (2 * kStages + 1) * 8;
  static constexpr int kSharedBytes = kStages * kStageBytes + 2 * kBoxes * kBoxBytes + 2 * kColumnBytes + kBarrierBytes;
  // The residual's tile as steps of the ring: 64 columns take kRows · 128 bytes, a step takes what fits a stage.
  static constexpr int kResidualColumns = kStageBytes / (kRows * 128) >= 2 ? 128 : 64;
  static constexpr int kResidualSteps = kColumns / kResidualColumns;

  static_assert(kColumns == 128 || kColumns == 256, "the widths that hopper.cuh wraps");
  static_assert(kSharedBytes <= 232448, "227 KB is what a block of sm_90 can have");
  static_assert(kStageBytes % 1024 == 0, "a stage starts on a swizzle pattern");
};

constexpr int kGemmThreads = 384;
constexpr int kLag = 2;  // steps between the two consumers

template <typename T, typename Shape, Activation kActivation, bool kResidual>
__global__ void __launch_bounds__(kGemmThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                const __grid_constant__ CUtensorMap residual_map, const __grid_constant__ CUtensorMap y_map,
                const GemmArguments of) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kResidualSteps = kResidual ? Shape::kResidualSteps : 0;
  extern __shared__ __align__(1024) uint8_t raw[];  // a swizzle pattern is 1 024 bytes
  const uint32_t base = shared_address(raw);
  const uint32_t staging = base + Shape::kStages * Shape::kStageBytes;
  float4* const staged_columns =
      reinterpret_cast<float4*>(raw + Shape::kStages * Shape::kStageBytes + 2 * Shape::kBoxes * kBoxBytes);
  const uint32_t full = staging + 2 * Shape::kBoxes * kBoxBytes + 2 * Shape::kColumnBytes;
  const uint32_t empty = full + 8 * Shape::kStages;
  const uint32_t lag = empty + 8 * Shape::kStages;  // the first consumer has begun its first steps
  const int group = warp_of_block() / 4;
  const uint32_t rank = block_in_cluster();

  if (threadIdx.x == 0) {
    constexpr int kReaders = 8;  // warps that consume a stage, in each block
    for (int s = 0; s < Shape::kStages; ++s) {
      init_barrier(full + 8 * s, 1);
      init_barrier(empty + 8 * s, kReaders * Shape::kCluster);
    }
    init_barrier(lag, 4);
    fence_barrier_init();
  }
  dependents_may_launch();
  cluster_sync();

  const int rows = of.rows, out = of.out;
  const int steps = (of.in + Shape::kDepth - 1) / Shape::kDepth;
  const int column_tiles = (out + Shape::kColumns - 1) / Shape::kColumns;
  const int row_tiles = (rows + Shape::kRows * Shape::kCluster - 1) / (Shape::kRows * Shape::kCluster);
  const int tiles = column_tiles * row_tiles;  // of a cluster
  const int first_tile = blockIdx.x / Shape::kCluster, tile_stride = gridDim.x / Shape::kCluster;
  // Columns run fastest: the blocks at work share rows of x, and W stays in L2.
  const auto row_of = [&](int tile) {
    const int at = of.backwards ? row_tiles - 1 - tile / column_tiles : tile / column_tiles;
    return (at * Shape::kCluster + int(rank)) * Shape::kRows;
  };
  const auto column_of = [&](int tile) { return tile % column_tiles * Shape::kColumns; };

  if (group == 0) {
    give_registers<40>();
    if (threadIdx.x == 0) {
      prefetch_map(&x_map);
      prefetch_map(&w_map);
      uint32_t stage = 0, phase = 1;  // the first pass over the ring finds every stage empty
      const auto advance = [&] {
        if (++stage == Shape::kStages) stage = 0, phase ^= 1;
      };
      const auto load_w = [&](uint32_t at, int step, int column) {
        const uint32_t to = base + at * Shape::kStageBytes + Shape::kXBytes + rank * Shape::kWShare * 128;
        arrive_expecting(full + 8 * at, Shape::kStageBytes);
        load_box_for(uint16_t((1 << Shape::kCluster) - 1), &w_map, to, full + 8 * at, step * Shape::kDepth,
                     column + int(rank) * Shape::kWShare);
      };
      // Weights depend on no earlier kernel: the first ones are on their way while that one still runs.
      const int early = first_tile < tiles ? min(steps, Shape::kStages) : 0;
      for (int step = 0; step < early; ++step) load_w(step, step, column_of(first_tile));
      wait_for_earlier_kernels();
      for (int tile = first_tile; tile < tiles; tile += tile_stride) {
        const int row = row_of(tile), column = column_of(tile);
        for (int step = 0; step < steps; ++step) {
          wait_barrier(empty + 8 * stage, phase);
          if (tile != first_tile || step >= early) load_w(stage, step, column);
          load_box(&x_map, base + stage * Shape::kStageBytes, full + 8 * stage, step * Shape::kDepth, row);
          advance();
        }
        for (int step = 0; step < kResidualSteps; ++step) {
          wait_barrier(empty + 8 * stage, phase);
          arrive_expecting(full + 8 * stage, Shape::kRows * Shape::kResidualColumns * 2);
          for (int box = 0; box < Shape::kResidualColumns / 64; ++box) {
            load_box(&residual_map, base + stage * Shape::kStageBytes + box * Shape::kRows * 128, full + 8 * stage,
                     column + step * Shape::kResidualColumns + box * 64, row);
          }
          advance();
        }
      }
    }
  } else {
    take_registers<232>();
    const int consumer = group - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int own_row = consumer * 64;  // in the block's tile
    const uint32_t own_staging = staging + consumer * Shape::kBoxes * kBoxBytes;
    uint32_t stage = 0, phase = 0;
    const auto advance = [&] {
      if (++stage == Shape::kStages) stage = 0, phase ^= 1;
    };
    const auto has_read = [&](uint32_t which) {
      if (lane < Shape::kCluster) arrive_in_cluster(empty + 8 * which, lane);
    };
    float4* const shared_columns = staged_columns + consumer * (Shape::kColumnBytes / 16);
    uint32_t boxes = 0;  // staged so far
    for (int tile = first_tile; tile < tiles; tile += tile_stride) {
      const int row = row_of(tile) + own_row, column = column_of(tile);

      // What the epilogue will need is asked for now: the columns' constants (a thread two columns), the rows' sums.
      float4 own_columns = {};
      if (thread < Shape::kColumns / 2) own_columns = __ldg(of.columns + column / 2 + thread);
      const int first_row = row + warp * 16 + lane / 4;
      if (of.row_sums != nullptr && tile == first_tile) wait_for_earlier_kernels();
      ManyRowsSums row_sums;
      if (of.row_sums != nullptr) row_sums.load(of, row + warp * 16, lane);

      float c[Shape::kColumns / 2];
      if (consumer == 1 && tile == first_tile) wait_barrier(lag, 0);
      uint32_t last_stage = stage;
      for (int step = 0; step < steps; ++step) {
        wait_barrier(full + 8 * stage, phase);
        const uint32_t x_from = base + stage * Shape::kStageBytes + own_row * 128;
        const uint32_t w_from = base + stage * Shape::kStageBytes + Shape::kXBytes;
        fence_registers();
#pragma unroll
        for (int k = 0; k < Shape::kDepth / 16; ++k) {
          multiply<T>(c, further(operand(x_from), k * 32), further(operand(w_from), k * 32), step + k > 0);
        }
        commit_products();
        if (step > 0) {
          wait_products<1>();  // the stage before this one has been read
          has_read(last_stage);
        }
        if (tile == first_tile && consumer == 0 && step == min(kLag, steps) - 1 && lane == 0) arrive(lag);
        last_stage = stage;
        advance();
      }
      wait_products<0>();
      has_read(last_stage);

      // The epilogue, 64 rows and 16 columns at a time.
      float2 scale[2] = {{activation_factor(kActivation), 0.0f}, {activation_factor(kActivation), 0.0f}};
      if (of.row_sums != nullptr) row_sums.scales(of, activation_factor(kActivation), lane, scale);
      constexpr int kChunks = kSumColumns / 16;
#pragma unroll
      for (int part = 0; part < Shape::kColumns / kSumColumns; ++part) {
        float2 sums[2][kChunks];
#pragma unroll
        for (int in_part = 0; in_part < kChunks; ++in_part) {
          const int chunk = part * kChunks + in_part;
          if constexpr (kResidual) {
            if (chunk % (Shape::kResidualColumns / 16) == 0) {
              wait_barrier(full + 8 * stage, phase);
              last_stage = stage;
              advance();
            }
          }
          const uint32_t box_at = own_staging + boxes % Shape::kBoxes * kBoxBytes;
          const int in_box = 2 * (chunk % 4) + lane / 16;  // 8 columns
          if (in_part == 0) {
            named_barrier_sync(1 + consumer, 128);  // everyone is done with the columns before
            if (thread / 64 == part) shared_columns[thread % 64] = own_columns;
            named_barrier_sync(1 + consumer, 128);
          }
          if (chunk % 4 == 0) {  // an empty box: all but the warp's newest stores have read theirs
            if (lane == 0) wait_stores_read<Shape::kBoxes - 1>();
            __syncwarp();
          }
          const float4 of_columns[2] = {shared_columns[in_part * 8 + lane % 4],
                                        shared_columns[in_part * 8 + lane % 4 + 4]};
          uint32_t residuals[4] = {};
          if constexpr (kResidual) {
            const int residual_box = chunk % (Shape::kResidualColumns / 16) / 4;
            load_matrices(residuals, base + last_stage * Shape::kStageBytes + residual_box * Shape::kRows * 128 +
                                         swizzled(own_row + warp * 16 + lane % 16, in_box));
          }
          // Of the four registers of an m16n16: (rows 0-7, columns 0-7), (rows 8-15, columns 0-7), then columns 8-15.
          uint32_t packed[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int at = 8 * chunk + 4 * (i / 2) + 2 * (i % 2);
            packed[i] = finish<T, kActivation, kResidual>(c[at], c[at + 1], of_columns[i / 2], scale[i % 2],
                                                          residuals[i], i < 2, sums[i % 2][in_part]);
          }
          store_matrices(box_at + swizzled(warp * 16 + lane % 16, in_box), packed);
          if (chunk % 4 == 3) {
            fence_for_copies();
            __syncwarp();
            if (lane == 0) {
              store_box(&y_map, box_at + warp * 16 * 128, column + chunk / 4 * 64, row + warp * 16);
              commit_stores();
            }
            ++boxes;
          }
          if constexpr (kResidual) {
            if ((chunk + 1) % (Shape::kResidualColumns / 16) == 0) has_read(last_stage);
          }
        }
        if constexpr (kResidual) {
          if (of.y_sums != nullptr)
            leave_sums<kSumColumns>(of, sums, rows, first_row, column + part * kSumColumns, lane);
        }
      }
    }
    if (lane == 0) wait_stores_done();
  }
  // A block may leave only when its neighbours have multicast and arrived into it for the last time.
  __syncwarp();
  cluster_sync();
#endif
}

}  // namespace embert::hopper
