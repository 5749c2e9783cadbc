// y[rows, out] = activation(x[rows, in] · W[out, in]ᵀ + bias (+ residual)) on Hopper, top to bottom.
//
// Persistent blocks of three warpgroups. The first copies tiles of x and W into a ring of stages; the other two take
// output tiles in turn ("ping-pong"): while one multiplies, the other adds the bias, applies the activation and stores,
// so that the epilogue costs no matrix time. Two blocks of a cluster take neighbouring row tiles and share each tile of
// W: half of it is fetched by each and multicast to both. Accumulation walks K in order in one FP32 accumulator: a
// row's bits depend on nothing but the row and the weights.
#pragma once

#include <type_traits>

#include "../kernels/activation.cuh"
#include "hopper.cuh"

namespace embert::hopper {

template <int kRowsValue, int kColumnsValue, int kClusterValue, int kStagesValue>
struct TileShape {
  static constexpr int kRows = kRowsValue;        // of x, a tile's
  static constexpr int kColumns = kColumnsValue;  // of y, a tile's
  static constexpr int kCluster = kClusterValue;  // blocks that share W's tile
  static constexpr int kStages = kStagesValue;
  static constexpr int kDepth = 64;  // of K, a stage: 128 bytes, one swizzled row
  static constexpr int kXBytes = kRows * kDepth * 2;
  static constexpr int kWBytes = kColumns * kDepth * 2;
  static constexpr int kStageBytes = kXBytes + kWBytes;
  // Tiles of a few columns go from registers to memory; others through a staging tile a consumer, in boxes of 64
  // columns.
  static constexpr bool kStaged = kColumns >= 64;
  static constexpr int kOutBytes = kStaged ? kRows * kColumns * 2 : 0;
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + 2 * kOutBytes + 256;

  static_assert(kRows % 64 == 0, "wgmma's M is 64");
  static_assert(kColumns == 16 || kColumns == 32 || kColumns == 64 || kColumns == 128,
                "the widths that hopper.cuh wraps");
  static_assert(kColumns / kCluster % 8 == 0, "each block's share of W's tile starts on a swizzle pattern");
  static_assert(kSharedBytes <= 232448, "227 KB is what a block of sm_90 can have");
  static_assert(kStageBytes % 1024 == 0, "a stage starts on a swizzle pattern");
  static_assert((2 * kStages + 4) * 8 <= 256, "the barriers' room");
};

constexpr int kGemmThreads = 384;

// Two neighbouring elements of y from their sums.
template <typename T, Activation kActivation, bool kResidual>
__device__ __forceinline__ uint32_t finished(float low, float high, uint32_t bias, uint32_t residual) {
  const float2 shift = unpack_two<T>(bias);
  low += shift.x;
  high += shift.y;
  if constexpr (kResidual) {
    const float2 rest = unpack_two<T>(residual);
    low += rest.x;
    high += rest.y;
  }
  return pack_two<T>(activate<kActivation, false>(low), activate<kActivation, false>(high));
}

template <typename T, typename Shape, Activation kActivation, bool kResidual>
__global__ void __launch_bounds__(kGemmThreads, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                const __grid_constant__ CUtensorMap residual_map, const __grid_constant__ CUtensorMap y_map,
                const T* bias, const T* residual, T* y, int rows, int out, int in) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kBlocks = Shape::kRows / 64;  // wgmma rows blocks of a tile
  extern __shared__ uint8_t raw[];
  const uint32_t base = (shared_address(raw) + 1023) & ~1023u;  // a swizzle pattern is 1 024 bytes
  const uint32_t staging = base + Shape::kStages * Shape::kStageBytes;
  const uint32_t full = staging + 2 * Shape::kOutBytes;
  const uint32_t empty = full + 8 * Shape::kStages;
  const uint32_t residual_full = empty + 8 * Shape::kStages;  // one a consumer
  const uint32_t multiplied = residual_full + 16;             // one a consumer: it has seen its tile's last stage
  const int group = threadIdx.x / 128;
  const uint32_t rank = Shape::kCluster > 1 ? block_in_cluster() : 0;

  if (threadIdx.x == 0) {
    for (int s = 0; s < Shape::kStages; ++s) {
      init_barrier(full + 8 * s, 1);
      init_barrier(empty + 8 * s, 4 * Shape::kCluster);  // every consuming warp of every block that it feeds
    }
    init_barrier(residual_full, 1);
    init_barrier(residual_full + 8, 1);
    init_barrier(multiplied, 4);
    init_barrier(multiplied + 8, 4);
    fence_barrier_init();
  }
  dependents_may_launch();
  if constexpr (Shape::kCluster > 1)
    cluster_sync();
  else
    __syncthreads();

  const int steps = (in + Shape::kDepth - 1) / Shape::kDepth;
  const int column_tiles = (out + Shape::kColumns - 1) / Shape::kColumns;
  const int row_tiles = (rows + Shape::kRows * Shape::kCluster - 1) / (Shape::kRows * Shape::kCluster);
  const int tiles = column_tiles * row_tiles;  // of a cluster
  const int first_tile = blockIdx.x / Shape::kCluster, tile_stride = gridDim.x / Shape::kCluster;
  // Columns run fastest: the blocks at work share rows of x, and W stays in L2.
  const auto row_of = [&](int tile) { return (tile / column_tiles * Shape::kCluster + int(rank)) * Shape::kRows; };
  const auto column_of = [&](int tile) { return tile % column_tiles * Shape::kColumns; };

  if (group == 0) {
    give_registers<40>();
    if (threadIdx.x == 0) {
      prefetch_map(&x_map);
      prefetch_map(&w_map);
      uint32_t stage = 0, phase = 1;  // the first pass over the ring finds every stage empty
      constexpr int kShare = Shape::kColumns / Shape::kCluster;
      const auto load_w = [&](uint32_t at, int step, int column) {
        const uint32_t w_to = base + at * Shape::kStageBytes + Shape::kXBytes;
        arrive_expecting(full + 8 * at, Shape::kStageBytes);
        if constexpr (Shape::kCluster > 1) {
          load_box_for(uint16_t((1 << Shape::kCluster) - 1), &w_map, w_to + rank * kShare * 128, full + 8 * at,
                       step * Shape::kDepth, column + int(rank) * kShare);
        } else {
          load_box(&w_map, w_to, full + 8 * at, step * Shape::kDepth, column);
        }
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
          if (++stage == Shape::kStages) stage = 0, phase ^= 1;
        }
      }
    }
  } else {
    take_registers<232>();
    const int consumer = group - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const uint32_t own_staging = staging + consumer * Shape::kOutBytes;
    const uint32_t own_residual = residual_full + 8 * consumer;
    uint32_t residual_phase = 0;
    int turn = 0;
    for (int tile = first_tile; tile < tiles; tile += tile_stride, ++turn) {
      if (turn % 2 != consumer) continue;
      const int row = row_of(tile), column = column_of(tile);
      if (Shape::kStaged && thread == 0) {
        wait_stores_read();  // the previous tile has left the staging memory
        if constexpr (kResidual) {
          wait_for_earlier_kernels();
          arrive_expecting(own_residual, Shape::kOutBytes);
          for (int box = 0; box < Shape::kColumns / 64; ++box) {
            load_box(&residual_map, own_staging + box * Shape::kRows * 128, own_residual, column + box * 64, row);
          }
        }
      }
      uint32_t biases[Shape::kColumns / 8];  // two columns each
#pragma unroll
      for (int j = 0; j < Shape::kColumns / 8; ++j) {
        const int at = column + j * 8 + 2 * (lane % 4);
        biases[j] = at < out ? __ldg(reinterpret_cast<const uint32_t*>(bias + at)) : 0;
      }

      float c[kBlocks][Shape::kColumns / 2];
      // The ring's place where this tile begins: tiles are `steps` apart.
      uint32_t stage = uint32_t(turn) * steps % Shape::kStages, phase = uint32_t(turn) * steps / Shape::kStages % 2;
      uint32_t last_stage = stage;
      // Not before the other consumer has seen all its stages: a barrier tells a phase from the next, not from the one
      // after.
      if (turn > 0) wait_barrier(multiplied + 8 * (1 - consumer), (turn - 1) / 2 % 2);
      for (int step = 0; step < steps; ++step) {
        wait_barrier(full + 8 * stage, phase);
        const uint32_t x_from = base + stage * Shape::kStageBytes, w_from = x_from + Shape::kXBytes;
        fence_registers();
#pragma unroll
        for (int k = 0; k < Shape::kDepth / 16; ++k) {
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            multiply<T>(c[block], operand(x_from + block * 64 * 128 + k * 32), operand(w_from + k * 32), step + k > 0);
          }
        }
        commit_products();
        if (step > 0) {
          wait_products<1>();  // the stage before this one has been read
          if (lane < Shape::kCluster) arrive_in_cluster(empty + 8 * last_stage, lane);
        }
        last_stage = stage;
        if (++stage == Shape::kStages) stage = 0, phase ^= 1;
      }
      if (lane == 0) arrive(multiplied + 8 * consumer);
      wait_products<0>();
      if (lane < Shape::kCluster) arrive_in_cluster(empty + 8 * last_stage, lane);

      if constexpr (!Shape::kStaged) {
        if constexpr (kResidual) wait_for_earlier_kernels();
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int j = 0; j < Shape::kColumns / 8; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int y_row = row + block * 64 + warp * 16 + lane / 4 + 8 * half;
              const int y_column = column + j * 8 + 2 * (lane % 4);
              if (y_row >= rows || y_column >= out) continue;
              const size_t at = size_t(y_row) * out + y_column;
              const uint32_t rest = kResidual ? *reinterpret_cast<const uint32_t*>(residual + at) : 0;
              *reinterpret_cast<uint32_t*>(y + at) = finished<T, kActivation, kResidual>(
                  c[block][4 * j + 2 * half], c[block][4 * j + 2 * half + 1], biases[j], rest);
            }
          }
        }
        continue;
      }

      if constexpr (kResidual) {
        wait_barrier(own_residual, residual_phase);
        residual_phase ^= 1;
      } else {
        warpgroup_sync(1 + consumer);  // thread 0 has seen the staging memory empty
      }
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int tile_row = block * 64 + warp * 16 + lane % 16;
#pragma unroll
        for (int j = 0; j < Shape::kColumns / 8; j += 2) {
          const int chunk = j + lane / 16;
          const uint32_t at = own_staging + chunk / 8 * Shape::kRows * 128 + swizzled(tile_row, chunk % 8);
          uint32_t residuals[4] = {};
          if constexpr (kResidual) load_matrices(residuals, at);
          uint32_t packed[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {  // (rows 0-7, j), (rows 8-15, j), (rows 0-7, j + 1), (rows 8-15, j + 1)
            const int at_c = 4 * (j + i / 2) + 2 * (i % 2);
            packed[i] = finished<T, kActivation, kResidual>(c[block][at_c], c[block][at_c + 1], biases[j + i / 2],
                                                            residuals[i]);
          }
          store_matrices(at, packed);
        }
      }
      fence_for_copies();
      warpgroup_sync(1 + consumer);
      if (thread == 0) {
        for (int box = 0; box < Shape::kColumns / 64; ++box) {
          store_box(&y_map, own_staging + box * Shape::kRows * 128, column + box * 64, row);
        }
        commit_stores();
      }
    }
    if (Shape::kStaged && thread == 0) wait_stores_done();
  }
  // A block may leave only when its neighbour has multicast and arrived into it for the last time.
  if constexpr (Shape::kCluster > 1) {
    __syncwarp();
    cluster_sync();
  }
#endif
}

}  // namespace embert::hopper
