// y[rows, out] = x[rows, in] · W[out, in]ᵀ + bias + residual with x and W in 8 bits, on Hopper for many rows: attention
// out where y has whole tiles of 256 columns.
//
// Two consumers take tiles of 64 × 256 in turn, so that one finishes a tile while the other multiplies. With 16 bits
// the products take so long that finishing wide.cuh's larger tiles costs less than what smaller ones read besides. With
// 8 bits they take half as long, and finishing as long as before: O of BERT-large takes 47 µs in wide.cuh for 16 384
// rows, and would take 24 at the rate that QKV reaches. Where K is long, wide.cuh stays faster.
//
// A consumer's staging memory holds its whole tile of y. The residual comes there while the tile is multiplied, and y
// replaces it. Each warp asks for its own 16 rows, so warps wait for each other only around the columns' constants.
#pragma once

#include "gemm/epilogue/finish.cuh"
#include "gemm/epilogue/sums.cuh"
#include "gemm/int8/aligned.cuh"
#include "gemm/loops/ring.cuh"
#include "ptx/named_barrier.cuh"
#include "ptx/shared_memory.cuh"
#include "ptx/trap.cuh"
#include "ptx/warp.cuh"

namespace embert::hopper {

struct ResidualTurns : StageShape<256, 1> {
  static constexpr int kThreads = 3 * 128;            // a group that copies and two consumers
  static constexpr int kStages = 4;                   // as many as fit
  static constexpr int kBoxes = kColumns / 64;        // of staging memory, a consumer
  static constexpr int kPairBytes = kSumColumns * 8;  // a consumer's constants of 128 columns
  static constexpr int kWarpBoxBytes = 16 * 128;      // of a box of 64 rows, a warp
  static constexpr int kStaging = kStages * kStageBytes;
  static constexpr int kConstants = kStaging + 2 * kBoxes * kBoxBytes;
  static constexpr int kFull = kConstants + 2 * kPairBytes;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kTurn = kEmpty + 8 * kStages;
  static constexpr int kResidual = kTurn + 2 * 8;  // a barrier for each warp: its residual is there
  static constexpr int kSharedBytes = kResidual + 8 * 8;
  static_assert(kSharedBytes <= kSharedLimit, "what a block can have");
};

// What turns integers of a warp's 16 rows, on its way: their scales, or the maxima of their blocks.
template <int kBlock>
struct AskedRows {
  BlockMaxima<kBlock> maxima;
  typename BlockMaxima<kBlock>::Held held;

  __device__ __forceinline__ AskedRows(const GemmArguments& of, const ProductScales& scales, int row, int lane)
      : maxima(scales.maxima, row + lane / 4, of.rows, of.in / kBlock) {
    maxima.ask(0);
    maxima.ask_all(of.in / kBlock, lane, held);
  }
};
template <>
struct AskedRows<0> {
  float2 scales;

  __device__ __forceinline__ AskedRows(const GemmArguments& of, const ProductScales& scales, int row, int lane)
      : scales{scales.rows[min(row + lane / 4, of.rows - 1)], scales.rows[min(row + lane / 4 + 8, of.rows - 1)]} {}
};

// A consumer's part in a block's work. kBlock: columns of x's blocks (norm/blocks.cuh); 0: x has a scale a row.
template <int kBlock>
__device__ __forceinline__ void finish_in_turns(uint8_t* raw, const Ring& ring, const Tiles<ResidualTurns>& tiles,
                                                const CUtensorMap& residual_map, const CUtensorMap& y_map,
                                                const GemmArguments& of, const ProductScales& scales, int consumer) {
  using Shape = ResidualTurns;
  using Pair = ColumnPair<true, false>;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int steps = (of.in + kDepthOf<int8_t> - 1) / kDepthOf<int8_t>;
  const uint32_t base = ring.base, turn = base + Shape::kTurn;
  const uint32_t residual_there = base + Shape::kResidual + 8 * (4 * consumer + warp);
  const uint32_t own_staging = base + Shape::kStaging + consumer * Shape::kBoxes * kBoxBytes;
  uint8_t* const constants = raw + Shape::kConstants + consumer * Shape::kPairBytes;
  Pair* const columns = reinterpret_cast<Pair*>(constants);
  float2* const of_part = reinterpret_cast<float2*>(constants);  // scales pass through the same memory
  int ordinal = consumer;                                        // of the tile among the block's
  int tile = tiles.first + ordinal * tiles.stride;
  if (tile >= tiles.end) return;
  wait_for_earlier_kernels();
  // What a tile needs of its rows is asked for before the tile before is finished.
  AskedRows<kBlock> asked(of, scales, tiles.row_of(tile) + warp * 16, lane);
  for (; tile < tiles.end; tile += 2 * tiles.stride, ordinal += 2) {
    const int row = tiles.row_of(tile) + warp * 16, column = tiles.column_of(tile), first_row = row + lane / 4;
    // Loads for the epilogue, which are in flight during the products: two columns a thread, and the rows' sums.
    const Pair own_columns = __ldg(column_pairs<true, false>(of) + column / 2 + thread);
    const float2 column_scales = __ldg(scales.columns + column / 2 + thread);
    ManyRowsSums row_sums;
    row_sums.load(of, row, lane);
    RingPlace<Shape::kStages> at{uint32_t(ordinal * steps) % Shape::kStages,
                                 uint32_t(ordinal * steps) / Shape::kStages & 1};
    int products[Shape::kColumns / 2];
    float2 x_scales;
    uint32_t last_stage;
    const auto wait_turn = [&] {
      if (ordinal > 0) wait_barrier(turn + 8 * consumer, (ordinal - 1) / 2 & 1);
    };
    // Once products are in flight: the stores of the tile before have read the memory by then.
    const auto committed = [&](int step) {
      if (step > 0) return;
      if (lane == 0) {
        wait_stores_read<0>();
        arrive_expecting(residual_there, Shape::kBoxes * Shape::kWarpBoxBytes);
#pragma unroll
        for (int box = 0; box < Shape::kBoxes; ++box)
          load_box(&residual_map, own_staging + box * kBoxBytes + warp * Shape::kWarpBoxBytes, residual_there,
                   column + box * 64, row);
      }
      __syncwarp();
    };
    if constexpr (kBlock > 0) {
      const __half2 largest = BlockMaxima<kBlock>::largest_of(asked.held);
      const __half2 inverses = row_inverses_of(largest);
      wait_turn();
      last_stage =
          multiply_aligned<kBlock, Shape>(ring, at, steps, 0, warp, lane, asked.maxima, inverses, products, committed);
      x_scales = row_scales_of<kBlock>(largest);
    } else {
      x_scales = asked.scales;
      wait_turn();
      auto& whole = reinterpret_cast<int (&)[1][Shape::kColumns / 2]>(products);
      last_stage = multiply_tile<int8_t, Shape>(ring, at, steps, 0, lane, whole, committed);
    }
    if (lane == 0) arrive(turn + 8 * (consumer ^ 1));  // its products follow while these are in flight
    finish_products(products);
    ring.has_read(last_stage, lane);
    const int next = tile + 2 * tiles.stride;
    if (next < tiles.end) asked = AskedRows<kBlock>(of, scales, tiles.row_of(next) + warp * 16, lane);

    float2 scale[2];
    row_sums.scales(of, 1.0f, lane, scale);
    wait_barrier(residual_there, ordinal / 2 & 1);
    constexpr int kChunks = kSumColumns / 16;
#pragma unroll
    for (int part = 0; part < Shape::kColumns / kSumColumns; ++part) {
      named_barrier_sync(kConsumerBarrier + consumer, 128);  // all have read the columns before
      if (thread / 64 == part) of_part[thread % 64] = column_scales;
      named_barrier_sync(kConsumerBarrier + consumer, 128);
      float scaled[kSumColumns / 2];
      scale_sums(products + part * kSumColumns / 2, x_scales, of_part, lane, scaled);
      named_barrier_sync(kConsumerBarrier + consumer, 128);
      if (thread / 64 == part) columns[thread % 64] = own_columns;
      named_barrier_sync(kConsumerBarrier + consumer, 128);
      float2 sums[2][kChunks];
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {  // 16 columns
        const Pair of_columns[2] = {columns[chunk * 8 + lane % 4], columns[chunk * 8 + lane % 4 + 4]};
        const uint32_t place = own_staging + (2 * part + chunk / 4) * kBoxBytes +
                               swizzled(warp * 16 + lane % 16, 2 * (chunk % 4) + lane / 16);
        uint32_t residuals[4], packed[4];
        load_matrices(residuals, place);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int element = 8 * chunk + 4 * (i / 2) + 2 * (i % 2);
          packed[i] =
              finish<half_t, Activation::kNone, true, false>(scaled[element], scaled[element + 1], of_columns[i / 2],
                                                             scale[i % 2], residuals[i], 0, i < 2, sums[i % 2][chunk]);
        }
        store_matrices(place, packed);
      }
      fence_for_copies();
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int box = 2 * part; box < 2 * part + 2; ++box)
          store_box(&y_map, own_staging + box * kBoxBytes + warp * Shape::kWarpBoxBytes, column + box * 64, row);
        commit_stores();
      }
      leave_sums<kSumColumns>(of, sums, of.rows, first_row, column + part * kSumColumns, lane);
    }
  }
  if (lane == 0) wait_stores_read<0>();  // before the block's shared memory ends
}

template <int kBlock>
__global__ void __launch_bounds__(ResidualTurns::kThreads, 1)
    residual_turns_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                          const __grid_constant__ CUtensorMap residual_map, const __grid_constant__ CUtensorMap y_map,
                          const GemmArguments of, const ProductScales scales) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = ResidualTurns;
  extern __shared__ __align__(1024) uint8_t raw[];  // a swizzle pattern is 1 024 bytes
  const uint32_t base = shared_address(raw);
  const Ring ring{base, base + Shape::kFull, base + Shape::kEmpty};
  const int group = warp_of_block() / 4;
  if (threadIdx.x == 32) prefetch_maps(x_map, w_map, residual_map, y_map);
  if (threadIdx.x == 0) {
    ring.init(Shape::kStages, 4);
    for (int consumer = 0; consumer < 2; ++consumer) init_barrier(base + Shape::kTurn + 8 * consumer, 4);
    for (int warp = 0; warp < 8; ++warp) init_barrier(base + Shape::kResidual + 8 * warp, 1);
    fence_barrier_init();
  }
  dependents_may_launch();
  wait_for_cluster_barriers();
  const Tiles<Shape> tiles(of);
  if (group == 0) {
    give_registers<40>();
    if (warp_of_block() == 0 && elect_lane()) {
      const int steps = (of.in + kDepthOf<int8_t> - 1) / kDepthOf<int8_t>;
      Copier<Shape, Tiles<Shape>, kDepthOf<int8_t>> copier(ring, tiles, steps, x_map, w_map, w_map);
      for (int tile = tiles.first; tile < tiles.end; tile += tiles.stride) copier.copy(tile);
      copier.wait_all_read();
    }
  } else {
    take_registers<232>();
    finish_in_turns<kBlock>(raw, ring, tiles, residual_map, y_map, of, scales, group - 1);
  }
#else
  EMBERT_TRAP("residual_turns_kernel");
#endif
}

}  // namespace embert::hopper
