// y[rows, out] = activation(x[rows, in] · W[out, in]ᵀ + bias) on Hopper for many rows: QKV and FFN in.
//
// Two consumers take the block's tiles of 128 × 128 in turn. One multiplies while the other finishes the tile before,
// so the matrix unit does not wait for epilogues. As long as K is short this gains more than the wider tile of
// wide.cuh, which reads less shared memory: 26 368 rows take 198 µs instead of 212 (768 to 3 072, GELU), 45 instead of
// 50 (384 to 1 152). At K = 3 072 the wider tile is faster (187, 210).
//
// Where there are no more tiles than blocks, turns are useless. Then a block's consumers take 64 rows each of its tile,
// and its epilogue is half as long (1 024 rows, 384 to 1 536: 8.2 µs against 9.0).
//
// Accumulation walks K in order in one FP32 accumulator, so a row's bits depend on the row and the weights alone. The
// epilogue applies the LayerNorm of x (EPILOGUES.md).
#pragma once

#include "gemm/epilogue/finish.cuh"
#include "gemm/epilogue/sums.cuh"
#include "gemm/loops/ring.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/trap.cuh"
#include "ptx/warp.cuh"

namespace embert::hopper {

struct PingPongShape : StageShape<128> {
  static constexpr int kStages = 6;                  // as many as fit
  static constexpr int kBoxes = 2;                   // of staging memory, a consumer
  static constexpr int kColumnBytes = kColumns * 8;  // a consumer's constants
  static constexpr int kStaging = kStages * kStageBytes;
  static constexpr int kConstants = kStaging + 2 * kBoxes * kBoxBytes;
  static constexpr int kFull = kConstants + 2 * kColumnBytes;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kTurn = kEmpty + 8 * kStages;
  static constexpr int kSharedBytes = kTurn + 2 * 8;
  static_assert(kSharedBytes <= kSharedLimit, "what a block can have");
  static_assert(kColumns == kSumColumns, "a thread's constants are two columns'");
};

// kTurns: the consumers take tiles in turn; otherwise they share each tile.
template <typename T, Activation kActivation, bool kTurns, bool kGammaInRows>
__global__ void __launch_bounds__(PingPongShape::kThreads, 1)
    pingpong_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                    const __grid_constant__ CUtensorMap y_map, const GemmArguments of) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = PingPongShape;
  constexpr int kConsumerRows = kTurns ? Shape::kRows : Shape::kRows / 2;
  constexpr int kHalves = kConsumerRows / 64;       // wgmma's M is 64
  extern __shared__ __align__(1024) uint8_t raw[];  // a swizzle pattern is 1 024 bytes
  const uint32_t base = shared_address(raw);
  const Ring ring{base, base + Shape::kFull, base + Shape::kEmpty};
  const uint32_t turn = base + Shape::kTurn;  // two barriers: a consumer may wait and multiply (ring.cuh)
  const int group = warp_of_block() / 4;

  if (threadIdx.x == 32) prefetch_maps(x_map, w_map, y_map);
  if (threadIdx.x == 0) {
    ring.init(Shape::kStages, kTurns ? 4 : 8);
    for (int consumer = 0; consumer < 2; ++consumer) init_barrier(turn + 8 * consumer, 4);
    fence_barrier_init();
  }
  dependents_may_launch();
  wait_for_cluster_barriers();

  const int steps = (of.in + kDepth - 1) / kDepth;
  const Tiles<Shape> tiles(of);

  if (group == 0) {
    give_registers<40>();
    if (warp_of_block() == 0 && elect_lane()) {
      Copier<Shape> copier(ring, tiles, steps, x_map, w_map, w_map);
      for (int tile = tiles.first; tile < tiles.end; tile += tiles.stride) copier.copy(tile);
      copier.wait_all_read();
    }
  } else {
    take_registers<232>();
    const int consumer = group - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int own_row = kTurns ? 0 : consumer * kConsumerRows;  // in the tile
    const uint32_t own_staging = base + Shape::kStaging + consumer * Shape::kBoxes * kBoxBytes + warp * 16 * 128;
    using Pair = ColumnPair<false, kGammaInRows>;
    Pair* const columns = reinterpret_cast<Pair*>(raw + Shape::kConstants + consumer * Shape::kColumnBytes);

    // Loads for the epilogue start a tile ahead: the columns' constants (two columns a thread) and the rows' sums.
    Pair own_columns = {};
    ManyRowsSums row_sums[kHalves];
    const auto ask_columns = [&](int tile) {
      if (thread < Shape::kColumns / 2)
        own_columns = __ldg(column_pairs<false, kGammaInRows>(of) + tiles.column_of(tile) / 2 + thread);
    };
    const auto ask_sums = [&](int tile) {
      if (of.row_sums == nullptr) return;
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
        row_sums[half].load(of, tiles.row_of(tile) + own_row + half * 64 + warp * 16, lane);
    };
    int ordinal = kTurns ? consumer : 0;  // of the tile among the block's
    int tile = tiles.first + ordinal * tiles.stride;
    if (tile < tiles.end) {
      ask_columns(tile);
      if (of.row_sums != nullptr) wait_for_earlier_kernels();
      ask_sums(tile);
    }
    for (constexpr int kEvery = kTurns ? 2 : 1; tile < tiles.end; tile += kEvery * tiles.stride, ordinal += kEvery) {
      const int row = tiles.row_of(tile) + own_row + warp * 16, column = tiles.column_of(tile);
      named_barrier_sync(kConsumerBarrier + consumer, 128);  // all have read the columns before
      if (thread < Shape::kColumns / 2) columns[thread] = own_columns;
      named_barrier_sync(kConsumerBarrier + consumer, 128);

      RingPlace<Shape::kStages> at{uint32_t(ordinal * steps) % Shape::kStages,
                                   uint32_t(ordinal * steps) / Shape::kStages & 1};
      if (kTurns && ordinal > 0) wait_barrier(turn + 8 * consumer, (ordinal - 1) / 2 & 1);
      float c[kHalves][Shape::kColumns / 2];
      const uint32_t last_stage = multiply_tile<T, Shape>(ring, at, steps, own_row, lane, c, [](int) {});
      if (kTurns && lane == 0) arrive(turn + 8 * (consumer ^ 1));  // its products follow while these are in flight
      finish_products(c);
      ring.has_read(last_stage, lane);  // at once: the other consumer waits for what is copied there next

      float2 scale[kHalves][2];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        scale[half][0] = scale[half][1] = float2{activation_factor(kActivation), 0.0f};
        if (of.row_sums != nullptr) row_sums[half].scales(of, activation_factor(kActivation), lane, scale[half]);
      }
      const int next = tile + kEvery * tiles.stride;
      if (next < tiles.end) {
        ask_columns(next);
        ask_sums(next);
      }
      // The epilogue, 16 rows a warp and 64 columns at a time. A scheduler has one warp here, which waits for every
      // result that it needs. So the work of a whole box is independent.
#pragma unroll
      for (int box = 0; box < Shape::kColumns / 64; ++box) {
        Pair of_columns[8];  // of columns 8i + 2 · (lane % 4) and the next
#pragma unroll
        for (int i = 0; i < 8; ++i) of_columns[i] = columns[box * 32 + i * 4 + lane % 4];
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const uint32_t box_at = own_staging + (box * kHalves + half) % Shape::kBoxes * kBoxBytes;
          uint32_t packed[4][4];  // 16 columns each, as two m16n8 accumulators with rows 0-7 and 8-15
          float2 none;
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            const int element = 32 * box + 2 * i;
            packed[i / 4][i % 4] = finish<T, kActivation, false, kGammaInRows>(
                c[half][element], c[half][element + 1], of_columns[i / 2], scale[half][i % 2], 0, 0, true, none);
          }
          if (lane == 0) wait_stores_read<Shape::kBoxes - 1>();  // the store from this box has read it
          __syncwarp();
#pragma unroll
          for (int i = 0; i < 4; ++i) store_matrices(box_at + swizzled(lane % 16, 2 * i + lane / 16), packed[i]);
          fence_for_copies();
          __syncwarp();
          if (lane == 0) {
            store_box(&y_map, box_at, column + box * 64, row + half * 64);
            commit_stores();
          }
        }
      }
    }
    if (lane == 0)
      wait_stores_read<0>();  // before the block and its shared memory end; the grid's end waits for the writes
  }
#else
  EMBERT_TRAP("pingpong_kernel");
#endif
}

}  // namespace embert::hopper
