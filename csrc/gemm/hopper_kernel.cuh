// y[rows, out] = activation(x[rows, in] · W[out, in]ᵀ + bias (+ residual)) on Hopper, top to bottom.
//
// Persistent blocks of three warpgroups. The first copies tiles of x and W into a ring of stages; the other two
// multiply 64 rows each and finish them. For many rows they work together, on one tile of 128 rows, the second a few
// steps behind the first: one finishes while the other still has, or has again, something to multiply. For few rows,
// where a block has one tile or two, they work in turn, on a tile of 64 rows each.
//
// Blocks of a cluster lie below each other in y and share the tile of W: each fetches its part and multicasts it.
// Accumulation walks K in order in one FP32 accumulator: a row's bits depend on nothing but the row and the weights.
// The residual of a large tile comes through the ring too, as one or two more steps after those of K.
//
// LayerNorms are folded in (../EPILOGUES.md): the epilogue turns the sums of its rows into (1/σ, −μ/σ), applies them to
// the product (its input's LayerNorm) or to the residual, and leaves the sums of its own rows for the next product.
// Few rows make few instructions: a kernel that runs for three microseconds spends them on fetching its own code.
#pragma once

#include <type_traits>

#include "../kernels/activation.cuh"
#include "hopper.cuh"
#include "hopper_sums.cuh"

namespace embert::hopper {

constexpr int kBoxBytes = 64 * 128;  // 64 rows of 64 columns: what wgmma's M and a swizzled row make

template <int kColumnsValue, int kClusterValue, int kStagesValue, int kBoxesValue, bool kTogetherValue>
struct TileShape {
  static constexpr bool kTogether = kTogetherValue;
  static constexpr int kRows = kTogether ? 128 : 64;  // of x, a block's tile; a consumer has 64, which is wgmma's M
  static constexpr int kColumns = kColumnsValue;      // of y
  static constexpr int kCluster = kClusterValue;      // blocks that share W's tile
  static constexpr int kStages = kStagesValue;
  static constexpr int kBoxes = kBoxesValue;  // of staging memory, a consumer; 0: from registers to memory
  static constexpr bool kStaged = kBoxes > 0;
  static constexpr int kDepth = 64;  // of K, a stage: 128 bytes, one swizzled row
  static constexpr int kXBytes = kRows * kDepth * 2;
  static constexpr int kWBytes = kColumns * kDepth * 2;
  static constexpr int kStageBytes = kXBytes + kWBytes;
  static constexpr int kWShare = kColumns / kCluster;                 // rows of W a block fetches
  static constexpr int kColumnBytes = kStaged ? kSumColumns * 8 : 0;  // a consumer's constants of up to 128 columns
  static constexpr int kBarrierBytes = (2 * kStages + 2) * 8;
  static constexpr int kSharedBytes = kStages * kStageBytes + 2 * kBoxes * kBoxBytes + 2 * kColumnBytes + kBarrierBytes;
  // The residual's tile as steps of the ring: 64 columns take kRows · 128 bytes, a step takes what fits a stage.
  static constexpr int kResidualColumns = kStageBytes / (kRows * 128) >= 2 && kColumns >= 128 ? 128 : 64;
  static constexpr int kResidualSteps = kStaged ? kColumns / kResidualColumns : 0;

  static_assert(kColumns == 16 || kColumns == 32 || kColumns == 64 || kColumns == 128 || kColumns == 256,
                "the widths that hopper.cuh wraps");
  static_assert(kWShare % 8 == 0, "each block's share of W's tile starts on a swizzle pattern");
  static_assert(kSharedBytes <= 232448, "227 KB is what a block of sm_90 can have");
  static_assert(kStageBytes % 1024 == 0, "a stage starts on a swizzle pattern");
  static_assert(kColumns >= 64 || !kStaged, "a box has 64 columns");
};

constexpr int kGemmThreads = 384;
constexpr int kLag = 2;  // steps between two consumers that work together

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
  const uint32_t multiplied = empty + 8 * Shape::kStages;  // one a consumer: it has seen its tile's last stage
  const int group = threadIdx.x / 128;
  const uint32_t rank = Shape::kCluster > 1 ? block_in_cluster() : 0;

  if (threadIdx.x == 0) {
    constexpr int kReaders = Shape::kTogether ? 8 : 4;  // warps that consume a stage, in each block
    for (int s = 0; s < Shape::kStages; ++s) {
      init_barrier(full + 8 * s, 1);
      init_barrier(empty + 8 * s, kReaders * Shape::kCluster);
    }
    for (int i = 0; i < 2; ++i) {
      init_barrier(multiplied + 8 * i, 4);
    }
    fence_barrier_init();
  }
  dependents_may_launch();
  if constexpr (Shape::kCluster > 1)
    cluster_sync();
  else
    __syncthreads();

  const int rows = of.rows, out = of.out;
  const int steps = (of.in + Shape::kDepth - 1) / Shape::kDepth;
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
      const auto advance = [&] {
        if (++stage == Shape::kStages) stage = 0, phase ^= 1;
      };
      const auto load_w = [&](uint32_t at, int step, int column) {
        const uint32_t to = base + at * Shape::kStageBytes + Shape::kXBytes + rank * Shape::kWShare * 128;
        arrive_expecting(full + 8 * at, of.x_bytes + Shape::kWBytes);
        if constexpr (Shape::kCluster > 1) {
          load_box_for(uint16_t((1 << Shape::kCluster) - 1), &w_map, to, full + 8 * at, step * Shape::kDepth,
                       column + int(rank) * Shape::kWShare);
        } else {
          load_box(&w_map, to, full + 8 * at, step * Shape::kDepth, column);
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
    const int own_row = Shape::kTogether ? consumer * 64 : 0;  // in the block's tile
    const uint32_t own_staging = staging + consumer * Shape::kBoxes * kBoxBytes;
    uint32_t stage = 0, phase = 0;
    const auto advance = [&] {
      if (++stage == Shape::kStages) stage = 0, phase ^= 1;
    };
    const auto has_read = [&](uint32_t which) {
      if (lane < Shape::kCluster) arrive_in_cluster(empty + 8 * which, lane);
    };
    float4* const shared_columns = staged_columns + consumer * (Shape::kColumnBytes / 16);
    uint32_t boxes = 0;       // staged so far
    int turn = 0, turns = 0;  // of all tiles, of this consumer's
    for (int tile = first_tile; tile < tiles; tile += tile_stride, ++turn) {
      if (!Shape::kTogether && turn % 2 != consumer) continue;
      const int row = row_of(tile) + own_row, column = column_of(tile);

      // What the epilogue will need is asked for now: the columns' constants (of a staged tile, a thread two columns),
      // the rows' sums, the residual of a tile that is not staged.
      constexpr int kAllChunks = Shape::kColumns / 16;
      float4 own_columns = {}, all_columns[Shape::kStaged ? 1 : kAllChunks][2];
      if constexpr (Shape::kStaged) {
        if (thread < Shape::kColumns / 2) own_columns = __ldg(of.columns + column / 2 + thread);
      } else {
#pragma unroll
        for (int i = 0; i < 2 * kAllChunks; ++i)
          all_columns[i / 2][i % 2] = __ldg(of.columns + column / 2 + lane % 4 + i * 4);
      }
      const int first_row = row + warp * 16 + lane / 4, first_column = column + 2 * (lane % 4);
      // Of the four registers of an m16n16: (rows 0-7, columns 0-7), (rows 8-15, columns 0-7), then columns 8-15.
      const auto is_inside = [&](int chunk, int i) {
        return first_row + 8 * (i % 2) < rows && first_column + chunk * 16 + 8 * (i / 2) < out;
      };
      const auto place = [&](int chunk, int i) {
        return size_t(first_row + 8 * (i % 2)) * out + first_column + chunk * 16 + 8 * (i / 2);
      };
      constexpr bool kReadsRows = kResidual && !Shape::kStaged;
      if ((of.row_sums != nullptr || kReadsRows) && turns++ == 0) wait_for_earlier_kernels();
      std::conditional_t<Shape::kTogether, ManyRowsSums, FewRowsSums> row_sums;
      if (of.row_sums != nullptr) row_sums.load(of, row + warp * 16, lane);
      uint32_t all_residuals[kReadsRows ? kAllChunks : 1][4];
      if constexpr (kReadsRows) {
#pragma unroll
        for (int i = 0; i < kAllChunks * 4; ++i) {
          const auto* const residual = static_cast<const T*>(of.residual) + place(i / 4, i % 4);
          all_residuals[i / 4][i % 4] = is_inside(i / 4, i % 4) ? *reinterpret_cast<const uint32_t*>(residual) : 0;
        }
      }

      float c[Shape::kColumns / 2];
      if constexpr (Shape::kTogether) {
        if (consumer == 1 && turn == 0) wait_barrier(multiplied, 0);  // the lag
      } else {
        // The ring's place where this tile begins: tiles are as many steps apart as each has.
        const uint32_t place = uint32_t(turn) * (steps + kResidualSteps);
        stage = place % Shape::kStages, phase = place / Shape::kStages % 2;
        // Not before the other consumer has seen all its stages: a barrier tells a phase from the next, not from the
        // one after.
        if (turn > 0) wait_barrier(multiplied + 8 * (1 - consumer), (turn - 1) / 2 % 2);
      }
      uint32_t last_stage = stage;
      for (int step = 0; step < steps; ++step) {
        wait_barrier(full + 8 * stage, phase);
        const uint32_t x_from = base + stage * Shape::kStageBytes + own_row * 128;
        const uint32_t w_from = base + stage * Shape::kStageBytes + Shape::kXBytes;
        fence_registers();
#pragma unroll
        for (int k = 0; k < Shape::kDepth / 16; ++k) {
          multiply<T>(c, operand(x_from + k * 32), operand(w_from + k * 32), step + k > 0);
        }
        commit_products();
        if (step > 0) {
          wait_products<1>();  // the stage before this one has been read
          has_read(last_stage);
        }
        if constexpr (Shape::kTogether) {
          if (turn == 0 && consumer == 0 && step == min(kLag, steps) - 1 && lane == 0) arrive(multiplied);
        }
        last_stage = stage;
        advance();
      }
      const uint32_t residual_stage = stage;
      if constexpr (kResidualSteps > 0 && !Shape::kTogether) wait_barrier(full + 8 * stage, phase);
      if (!Shape::kTogether && lane == 0) arrive(multiplied + 8 * consumer);
      wait_products<0>();
      has_read(last_stage);

      // The epilogue, 64 rows and 16 columns at a time.
      float2 scale[2] = {{activation_factor(kActivation), 0.0f}, {activation_factor(kActivation), 0.0f}};
      if (of.row_sums != nullptr) row_sums.scales(of, activation_factor(kActivation), lane, scale);
      constexpr int kPartColumns = Shape::kColumns < kSumColumns ? Shape::kColumns : kSumColumns;  // of one sum
      constexpr int kChunks = kPartColumns / 16;
#pragma unroll
      for (int part = 0; part < Shape::kColumns / kPartColumns; ++part) {
        float2 sums[2][kChunks];
#pragma unroll
        for (int in_part = 0; in_part < kChunks; ++in_part) {
          const int chunk = part * kChunks + in_part;
          if constexpr (kResidualSteps > 0 && Shape::kTogether) {
            if (chunk % (Shape::kResidualColumns / 16) == 0) {
              wait_barrier(full + 8 * stage, phase);
              last_stage = stage;
              advance();
            }
          }
          const uint32_t residual_from = Shape::kTogether ? last_stage : residual_stage;
          const uint32_t box_at = own_staging + boxes % (Shape::kStaged ? Shape::kBoxes : 1) * kBoxBytes;
          const int in_box = 2 * (chunk % 4) + lane / 16;  // 8 columns
          float4 of_columns[2];
          if constexpr (Shape::kStaged) {
            if (in_part == 0) {
              warpgroup_sync(1 + consumer);  // everyone is done with the columns before
              if (thread / 64 == part) shared_columns[thread % 64] = own_columns;
              warpgroup_sync(1 + consumer);
            }
            if (chunk % 4 == 0) {  // an empty box: all but the warp's newest stores have read theirs
              if (lane == 0) wait_stores_read<Shape::kBoxes - 1>();
              __syncwarp();
            }
            of_columns[0] = shared_columns[in_part * 8 + lane % 4];
            of_columns[1] = shared_columns[in_part * 8 + lane % 4 + 4];
          } else {
            of_columns[0] = all_columns[chunk][0], of_columns[1] = all_columns[chunk][1];
          }
          uint32_t residuals[4];
          if constexpr (kResidual && Shape::kStaged) {
            const int residual_box = chunk % (Shape::kResidualColumns / 16) / 4;
            load_matrices(residuals, base + residual_from * Shape::kStageBytes + residual_box * Shape::kRows * 128 +
                                         swizzled(own_row + warp * 16 + lane % 16, in_box));
          } else if constexpr (kResidual) {
#pragma unroll
            for (int i = 0; i < 4; ++i) residuals[i] = all_residuals[chunk][i];
          }
          uint32_t packed[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float4 k = of_columns[i / 2];
            const float2 by = scale[i % 2];
            const int at_c = 8 * chunk + 4 * (i / 2) + 2 * (i % 2);
            float low = c[at_c], high = c[at_c + 1];
            if constexpr (kResidual) {
              const float2 rest = unpack_two<T>(residuals[i]);
              low = fmaf(fmaf(rest.x, by.x, by.y), k.x, low + k.y);
              high = fmaf(fmaf(rest.y, by.x, by.y), k.z, high + k.w);
              const float2 two = {low + high, fmaf(low, low, high * high)};
              float2& sum = sums[i % 2][in_part];
              sum = i < 2 ? two : sum + two;
            } else {
              low = activate<kActivation, false>(fmaf(low, by.x, fmaf(by.y, k.x, k.y)));
              high = activate<kActivation, false>(fmaf(high, by.x, fmaf(by.y, k.z, k.w)));
            }
            packed[i] = pack_two<T>(low, high);
          }
          if constexpr (Shape::kStaged) {
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
          } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if (is_inside(chunk, i))
                *reinterpret_cast<uint32_t*>(static_cast<T*>(of.y) + place(chunk, i)) = packed[i];
            }
          }
          if constexpr (kResidualSteps > 0) {
            if ((chunk + 1) % (Shape::kResidualColumns / 16) == 0) has_read(residual_from);
          }
        }
        if constexpr (kResidual) {
          if (of.y_sums != nullptr) {
            constexpr int kParts = kSumColumns / kPartColumns;
            const int pitch = (out + kSumColumns - 1) / kSumColumns * kParts;
            const int part_column = column + part * kPartColumns;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              combine_chunks(sums[half], lane);
              if (lane % 4 == 0 && first_row + 8 * half < rows && part_column < out)
                of.y_sums[size_t(first_row + 8 * half) * pitch + part_column / kPartColumns] = sums[half][0];
            }
          }
        }
      }
    }
    if (Shape::kStaged && lane == 0) wait_stores_done();
  }
  // A block may leave only when its neighbours have multicast and arrived into it for the last time.
  if constexpr (Shape::kCluster > 1) {
    __syncwarp();
    cluster_sync();
  }
#endif
}

}  // namespace embert::hopper
