// All that follows attention in a layer of narrow models, hidden size 384, in one kernel for many rows:
//
//   x[rows, 384] = attended · W_oᵀ + b_o + residual
//   y[rows, 384] = activation(x · W_inᵀ + b_in) · W_outᵀ + b_out + x,   W_in [inner, 384], W_out [384, inner]
//
// As three products it moves x and, twice, the inner activations: 222 of 464 MB of a layer of MiniLM for 26 368 rows.
// Here x stays in shared memory, and the inner activations never leave a warp's registers. A consumer multiplies 64
// rows of x with 64 rows of W_in, applies the activation, and what was an accumulator is wgmma's left operand for 64
// columns of W_out: a chunk. The accumulators of y, [64, 384] a consumer, stay in registers over all chunks; before,
// they are those of x. They are 192 of a thread's 255, which is why no wider model fits, why a block has two
// warpgroups and none that only copies, and why W comes 64 inner activations at a time.
//
// The consumers take the matrix unit in turn, a product at a time: one's activation passes while the other multiplies.
// The product before has nothing to wait for, so there they both multiply when they can.
//
// Clusters share the work to a chunk: a cluster's range of (tile, chunk) begins and ends inside tiles. It begins with
// its last tile's x and first chunks and leaves x, its rows' scales and the accumulators in memory; the next cluster,
// which has the rest of that tile, does it last. So nobody waits for long, and for nobody whose blocks come later.
// Chunks are added in their order all the same, in FP32: the same bits as those of the products by themselves, since x
// and the inner activations are rounded as if stored. LayerNorms are folded in likewise (../EPILOGUES.md), x's sums
// never leaving the warp that makes them; x in shared memory is also the residual, and y replaces it there before it is
// stored, as x replaced the attended rows.
#pragma once

#include "feed_forward_range.h"
#include "hopper_tiles.cuh"

namespace embert::hopper {

struct TailShape {
  static constexpr int kHidden = 384;
  static constexpr int kRows = 128;     // 64 a consumer
  static constexpr int kThreads = 256;  // two consumers
  static constexpr int kChunk = 64;     // of the inner activations
  static constexpr int kBoxes = kHidden / 64;
  static constexpr int kXBytes = kBoxes * kBoxBytes;  // a consumer's
  // A stage of the ring: a chunk's rows of W_in and half of K, or its columns of W_out and half of the rows; of W_o
  // half of the rows and 64 of K; or a quarter of the residual's columns.
  static constexpr int kHalf = kHidden / 2;
  static constexpr int kStageBytes = kHalf * kChunk * 2;
  static constexpr int kStages = 4;  // a chunk's, each always in the same place: that spares registers
  static constexpr int kQuarter = kHidden / kStages;
  static constexpr int kNarrowBox = kRows * 64;  // bytes; 32 columns of the residual
  static constexpr int kMostInner = 3072;        // columns whose constants are there all along
  static constexpr int kRing = 2 * kXBytes;
  static constexpr int kInColumns = kRing + kStages * kStageBytes;
  static constexpr int kOutColumns = kInColumns + kMostInner * 4;
  static constexpr int kAttendedColumns = kOutColumns + kHidden * 8;
  static constexpr int kScales = kAttendedColumns + kHidden * 8;  // of the rows, a float2 each
  static constexpr int kSums = kScales + kRows * 8;               // of the residual's rows
  static constexpr int kSumBytes = kHidden / kSumColumns * 8;     // a row's
  static constexpr int kFull = kSums + kRows * kSumBytes;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kXFull = kEmpty + 8 * kStages;  // a barrier a consumer
  static constexpr int kTurn = kXFull + 2 * 8;
  static constexpr int kRange = kTurn + 2 * 8;
  static constexpr int kSharedBytes = kRange + 16;
  static_assert(kSharedBytes <= kSharedLimit, "what a block can have");
  static_assert(kRows * kQuarter * 2 == kStageBytes && kQuarter % 32 == 0, "a stage is a quarter of the residual");

  static constexpr int kHeldFloats = kRows * (kHidden + 2);  // accumulators that a block leaves, and rows' scales
  static constexpr int kFlags = kThreads / 32;               // a warp's are there
};

// The third product is in GemmArguments; here are the others, and what clusters leave each other.
struct TailArguments {
  GemmArguments attended;
  const float2* in_columns;  // two columns each: (c, c)
  int chunks;
  float* held;  // [blocks, kHeldFloats]
  int* flags;   // [blocks, kFlags]; 0 before and after
};

// (1/σ, −μ/σ), both times `factor`, of a row from the sums of its groups, in the order of row_sums.cuh.
__device__ __forceinline__ float2 scale_of(const GemmArguments& of, const float2* sums, float factor) {
  static_assert(TailShape::kHidden / kSumColumns == 3, "groups g and g + 4, then neighbours, then pairs");
  return row_scale((sums[0] + sums[1]) + sums[2], of.inverse_width, of.epsilon, factor);
}

// The last step of both products with a residual: a warp's 16 rows of 384 columns, 16 columns at a time, into its rows
// of the consumer's tile. `residual_at` says where a piece's residual is, `stored` is told of each piece, `summed` of
// this lane's two rows' sums of each 128 columns. Those are added as by combine_chunks, but as soon as two of its
// operands are there, which is why pieces come in that order: registers are scarce.
template <typename T, typename ResidualAt, typename Stored, typename Summed>
__device__ __forceinline__ void finish_rows(const float (&y)[2][TailShape::kHalf / 2], const float4* columns,
                                            const float2 (&by)[2], uint32_t tile, int warp, int lane,
                                            ResidualAt residual_at, Stored stored, Summed summed) {
  constexpr int kPieces = kSumColumns / 16;
  constexpr int kOrder[kPieces] = {0, 4, 2, 6, 1, 5, 3, 7};
#pragma unroll
  for (int part = 0; part < TailShape::kHidden / kSumColumns; ++part) {
    float2 one[2], two[2], four[2];  // sums of so many pieces that wait for others
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = part * kPieces + kOrder[i];
      const uint32_t place =
          tile + piece / 4 * kBoxBytes + swizzled(warp * 16 + lane % 16, 2 * (piece % 4) + lane / 16);
      const float4 of_columns[2] = {columns[piece * 8 + lane % 4], columns[piece * 8 + lane % 4 + 4]};
      uint32_t residuals[4], packed[4];
      float2 sums[2];
      load_matrices(residuals, residual_at(piece, place));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int at = 8 * (piece % 12) + 4 * (k / 2) + 2 * (k % 2);
        packed[k] = finish<T, Activation::kNone, true>(y[piece / 12][at], y[piece / 12][at + 1], of_columns[k / 2],
                                                       by[k % 2], residuals[k], k < 2, sums[k % 2]);
      }
      store_matrices(place, packed);
      stored(piece);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (i % 2 == 0) {
          one[half] = sums[half];
          continue;
        }
        const float2 of_two = shared_sum(one[half], sums[half], 2, lane);
        if (i % 4 == 1) {
          two[half] = of_two;
          continue;
        }
        const float2 of_four = shared_sum(two[half], of_two, 1, lane);
        if (i == 3) {
          four[half] = of_four;
        } else {
          four[half] = four[half] + of_four;
          four[half] = four[half] + of_lane(four[half], 1);
          four[half] = four[half] + of_lane(four[half], 2);
        }
      }
    }
    summed(part, four);
  }
}

template <typename T, Activation kActivation>
__global__ void __launch_bounds__(TailShape::kThreads, 1)
    layer_tail_kernel(const __grid_constant__ CUtensorMap attended_map,
                      const __grid_constant__ CUtensorMap attended_w_map,
                      const __grid_constant__ CUtensorMap residual_map, const __grid_constant__ CUtensorMap x_map,
                      const __grid_constant__ CUtensorMap in_map, const __grid_constant__ CUtensorMap out_map,
                      const __grid_constant__ CUtensorMap y_map, const GemmArguments of, const TailArguments work) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = TailShape;
  extern __shared__ __align__(1024) uint8_t raw[];  // a swizzle pattern is 1 024 bytes
  const uint32_t base = shared_address(raw);
  const Ring ring{base + Shape::kRing, base + Shape::kFull, base + Shape::kEmpty};
  const uint32_t turn = base + Shape::kTurn;  // two barriers: a consumer may multiply
  const int consumer = warp_of_block() / 4, warp = warp_of_block() % 4, lane = threadIdx.x % 32;
  const uint32_t x_full = base + Shape::kXFull + 8 * consumer;
  const uint32_t own_x = base + consumer * Shape::kXBytes;
  float4* const out_columns = reinterpret_cast<float4*>(raw + Shape::kOutColumns);
  float4* const attended_columns = reinterpret_cast<float4*>(raw + Shape::kAttendedColumns);
  float2* const scales_of_warp = reinterpret_cast<float2*>(raw + Shape::kScales) + consumer * 64 + warp * 16;

  const int tiles = (of.rows + Shape::kRows * kCluster - 1) / (Shape::kRows * kCluster);  // a cluster's
  if (threadIdx.x == 0) {
    ring.init(Shape::kStages, 8);
    for (int i = 0; i < 2; ++i) {
      init_barrier(base + Shape::kXFull + 8 * i, 4);
      init_barrier(turn + 8 * i, 4);
    }
    fence_barrier_init();
    const FeedForwardRange range =
        FeedForwardRange::of(tiles, work.chunks, blockIdx.x / kCluster, gridDim.x / kCluster);
    *reinterpret_cast<int4*>(raw + Shape::kRange) = {range.tile, range.from, range.end_tile, range.end_to};
  }
  if (threadIdx.x < Shape::kHidden / 2) {
    out_columns[threadIdx.x] = __ldg(column_pairs<true>(of) + threadIdx.x);
    attended_columns[threadIdx.x] = __ldg(column_pairs<true>(work.attended) + threadIdx.x);
  }
  for (int i = threadIdx.x; i < work.chunks * Shape::kChunk / 2; i += Shape::kThreads)
    reinterpret_cast<float2*>(raw + Shape::kInColumns)[i] = __ldg(work.in_columns + i);
  dependents_may_launch();
  cluster_sync();

  // Asked for whenever they are needed, which is rarely: in registers they would stand all along.
  const auto rank_now = [] { return int(block_in_cluster()); };
  const auto range_now = [&] {
    FeedForwardRange range{work.chunks, 0, 0, 0, 0};
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(range.tile), "=r"(range.from), "=r"(range.end_tile), "=r"(range.end_to)
                 : "r"(base + Shape::kRange));
    return range;
  };
  const auto row_of = [&](int tile) {  // the consumer's first
    return ((of.backwards ? tiles - 1 - tile : tile) * kCluster + rank_now()) * Shape::kRows + consumer * 64;
  };

  // Copies, each by one thread. Of W a block fetches a half for both.
  constexpr uint16_t kBoth = (1 << kCluster) - 1;
  const auto load_in = [&](int half, int chunk) {
    constexpr int kShare = Shape::kChunk / kCluster;
    const int rank = rank_now();
    const uint32_t full = ring.full + 8 * half;
    arrive_expecting(full, Shape::kStageBytes);
#pragma unroll
    for (int box = 0; box < Shape::kHalf / 64; ++box)
      load_box_for(kBoth, &in_map, ring.base + half * Shape::kStageBytes + box * kBoxBytes + rank * kShare * 128, full,
                   half * Shape::kHalf + box * 64, chunk * Shape::kChunk + rank * kShare);
  };
  // Half of the rows of W_out or W_o, 64 of K.
  const auto load_half = [&](const CUtensorMap* map, int stage, int step) {
    constexpr int kShare = Shape::kHalf / kCluster;
    const int rank = rank_now();
    const uint32_t full = ring.full + 8 * stage;
    arrive_expecting(full, Shape::kStageBytes);
    load_box_for(kBoth, map, ring.base + stage * Shape::kStageBytes + rank * kShare * 128, full, step * 64,
                 stage % 2 * Shape::kHalf + rank * kShare);
  };
  const auto load_out = [&](int half, int chunk) { load_half(&out_map, 2 + half, chunk); };
  // W_o comes in rounds of the ring: two of its steps of K are one.
  const auto load_attended_w = [&](int stage, int round) { load_half(&attended_w_map, stage, 2 * round + stage / 2); };
  const auto load_residual = [&](int quarter, int tile) {
    const uint32_t full = ring.full + 8 * quarter;
    arrive_expecting(full, Shape::kStageBytes);
    for (int box = 0; box < Shape::kQuarter / 32; ++box)
      load_box(&residual_map, ring.base + quarter * Shape::kStageBytes + box * Shape::kNarrowBox, full,
               quarter * Shape::kQuarter + box * 32, row_of(tile) - consumer * 64);
  };
  // A warp's own rows of a tile: of what attention left, with the residual's sums, or of x.
  const auto load_rows = [&](const CUtensorMap* map, int tile, bool with_sums) {
    const int row = row_of(tile) + warp * 16;
    const int left = min(max(of.rows - row, 0), 16);
    // Whole 16 bytes: 8 past an odd number of rows, which are nobody's.
    const int sums = with_sums && work.attended.row_sums != nullptr ? (left * Shape::kSumBytes + 15) / 16 * 16 : 0;
    arrive_expecting(x_full, Shape::kXBytes / 4 + sums);
#pragma unroll 1
    for (int box = 0; box < Shape::kBoxes; ++box)
      load_box(map, own_x + box * kBoxBytes + warp * 16 * 128, x_full, box * 64, row);
    if (sums > 0) {
      load_bytes(work.attended.row_sums + size_t(row) * (Shape::kSumBytes / 8),
                 base + Shape::kSums + (consumer * 64 + warp * 16) * Shape::kSumBytes, x_full, sums);
    }
  };
  constexpr int kRounds = Shape::kHidden / 128;
  if (consumer == 0 && warp == 0 && elect_lane()) {
    prefetch_map(&attended_w_map);
    prefetch_map(&attended_map);
    prefetch_map(&residual_map);
    prefetch_map(&in_map);
    prefetch_map(&out_map);
    prefetch_map(&x_map);
    prefetch_map(&y_map);
    for (int stage = 0; stage < Shape::kStages; ++stage) load_attended_w(stage, 0);
  }
  wait_for_earlier_kernels();
  if (elect_lane()) load_rows(&attended_map, range_now().run(0).tile, true);
  __syncwarp();

  // Consumer 0 and consumer 1 have a chunk's first product in turn, then its second. Waits for stages are taken in
  // turn, too.
  const auto wait_turn = [&](int product) { wait_barrier(turn + 8 * consumer, consumer ^ product ^ 1); };
  const auto pass_turn = [&] {
    if (lane_of_warp() == 0) arrive(turn + 8 * (consumer ^ 1));
  };
  const auto wait_read = [&](int stage) {  // the products of two stages
    wait_products<1>();
    ring.has_read(stage, lane_of_warp());
    wait_products<0>();
    ring.has_read(stage + 1, lane_of_warp());
  };
  // Waits until everyone has read a stage, then lets `load` fill it again; by a consumer's first warp.
  const auto refill = [&](int by, int stage, uint32_t parity, auto load) {
    if (consumer == by && warp == 0) {
      if (elect_lane()) {
        wait_barrier(ring.empty + 8 * stage, parity);
        load();
      }
      __syncwarp();
    }
  };

  // Where a warp of a block leaves its rows' scales.
  const auto scales_left = [&](int block) {
    return reinterpret_cast<float2*>(work.held + size_t(block) * Shape::kHeldFloats + Shape::kRows * Shape::kHidden) +
           consumer * 64 + warp * 16;
  };
  // A warp's rows of 128 columns, which are in the consumer's tile now.
  const auto store_part = [&](const CUtensorMap* map, int part, int tile) {
    fence_for_copies();
    __syncwarp();
    if (lane_of_warp() == 0) {
#pragma unroll
      for (int box = 2 * part; box < 2 * part + 2; ++box)
        store_box(map, own_x + box * kBoxBytes + warp * 16 * 128, box * 64, row_of(tile) + warp * 16);
      commit_stores();
    }
  };
  // What this warp leaves for the next cluster is there.
  const auto set_own_flag = [&] {
    if (lane_of_warp() == 0) {
      wait_stores_done();
      fence_for_copies_of_memory();
      set_flag(work.flags + blockIdx.x * Shape::kFlags + consumer * 4 + warp);
    }
    __syncwarp();
  };

  // Asks for a warp's rows of run i, whose place nobody needs any more.
  const auto ask_rows = [&](int i) {
    if (lane_of_warp() == 0) wait_stores_read<0>();
    __syncwarp();
    if (elect_lane()) {
      const FeedForwardRun run = range_now().run(i);
      if (run.from > 0) {
        int* const flag = work.flags + (blockIdx.x - kCluster) * Shape::kFlags + consumer * 4 + warp;
        wait_flag(flag);
        *flag = 0;
        fence_for_copies_of_memory();
      }
      load_rows(run.from > 0 ? &x_map : &attended_map, run.tile, run.from == 0);
    }
    __syncwarp();
  };

  uint32_t phase = 0;
  for (int i = 0; i < range_now().runs(); ++i) {
    const FeedForwardRun run = range_now().run(i);
    float y[2][Shape::kHalf / 2];  // 192 columns each
    if (run.from == 0) {
      const int lane = lane_of_warp();
      wait_barrier(x_full, i & 1);
#pragma unroll 1
      for (int round = 0; round < kRounds; ++round, phase ^= 1) {
        // A stage is filled again two stages later: everyone has read it then, and the next one is under way.
        const auto fill = [&](int stage, int of_round) {
          refill(0, stage, of_round == round ? phase ^ 1 : phase, [&] {
            if (of_round < kRounds)
              load_attended_w(stage, of_round);
            else
              load_residual(stage, run.tile);
          });
        };
#pragma unroll
        for (int stage = 0; stage < Shape::kStages; ++stage) {
          wait_barrier(ring.full + 8 * stage, phase);
          fence_registers();
#pragma unroll
          for (int k = 0; k < 4; ++k)
            multiply<T>(y[stage % 2], further(operand(own_x + round * 2 * kBoxBytes), stage / 2 * kBoxBytes + k * 32),
                        further(operand(ring.base), stage * Shape::kStageBytes + k * 32),
                        k > 0 || stage > 1 || round > 0);
          commit_products();
          if (stage > 0) {
            wait_products<1>();
            ring.has_read(stage - 1, lane_of_warp());
          }
          if (stage > 1)
            fill(stage - 2, round + 1);
          else if (round > 0)
            fill(stage + 2, round);
        }
        wait_products<0>();
        ring.has_read(3, lane_of_warp());
      }
      for (int stage = 2; stage < 4; ++stage) refill(1, stage, phase ^ 1, [&] { load_residual(stage, run.tile); });
      float2 by[2] = {{1.0f, 0.0f}, {1.0f, 0.0f}};
      if (work.attended.row_sums != nullptr) {
        const float2* const sums = reinterpret_cast<const float2*>(raw + Shape::kSums) +
                                   (consumer * 64 + warp * 16 + lane / 4) * (Shape::kSumBytes / 8);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          by[half] = scale_of(work.attended, sums + half * 8 * (Shape::kSumBytes / 8), 1.0f);
      }
      named_barrier_sync(1 + consumer, 128);  // all of the attended rows have been read
      float2 group_sums[2][Shape::kHidden / kSumColumns];
      finish_rows<T>(
          y, attended_columns, by, own_x, warp, lane,
          [&](int piece, uint32_t) {
            const int quarter = piece / 6;
            if (piece == 0 || piece == 6 || piece == 12 || piece == 20)  // a quarter's first in finish_rows' order
              wait_barrier(ring.full + 8 * quarter, phase);
            return ring.base + quarter * Shape::kStageBytes + piece % 6 / 2 * Shape::kNarrowBox +
                   narrow_swizzled(consumer * 64 + warp * 16 + lane % 16, piece % 2 * 2 + lane / 16);
          },
          [&](int piece) {
            const int quarter = piece / 6;
            if (piece != 3 && piece != 11 && piece != 17 && piece != 23) return;  // a quarter's last
            ring.has_read(quarter, lane);
            if (quarter == 1 || quarter == 2) refill(0, quarter - 1, phase, [&] { load_in(quarter - 1, 0); });
          },
          [&](int part, const float2(&sums)[2]) {
            group_sums[0][part] = sums[0], group_sums[1][part] = sums[1];
            if (run.to < work.chunks) store_part(&x_map, part, run.tile);  // for the next cluster
          });
      phase ^= 1;
      fence_for_copies();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        by[half] = {activation_factor(kActivation), 0.0f};
        if (of.row_sums != nullptr) by[half] = scale_of(of, group_sums[half], activation_factor(kActivation));
        if (lane % 4 == 0) scales_of_warp[lane / 4 + 8 * half] = by[half];
      }
      __syncwarp();
      named_barrier_sync(1 + consumer, 128);  // all of x is there
    } else {
      const int lane = lane_of_warp();
      const float4* const held =
          reinterpret_cast<const float4*>(work.held + size_t(blockIdx.x - kCluster) * Shape::kHeldFloats) +
          (consumer * 4 + warp) * (16 * Shape::kHidden / 4) + lane;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int at = 0; at < Shape::kHalf / 2; at += 4) {
          const float4 four = __ldcg(held + (half * Shape::kHalf / 2 + at) * 8);
          y[half][at] = four.x, y[half][at + 1] = four.y, y[half][at + 2] = four.z, y[half][at + 3] = four.w;
        }
      }
      if (lane < 16) {
        scales_of_warp[lane] = __ldcg(scales_left(blockIdx.x - kCluster) + lane);
      }
      __syncwarp();
      wait_barrier(x_full, i & 1);
    }

    if (i == 1 && range_now().end_to != 0 && run.from == 0) set_own_flag();  // of run 0
    for (int chunk = run.from; chunk < run.to; ++chunk, phase ^= 1) {
      wait_turn(0);
      float inner[Shape::kChunk / 2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        wait_barrier(ring.full + 8 * half, phase);
        const uint32_t w_from = ring.base + half * Shape::kStageBytes;
        fence_registers();
#pragma unroll
        for (int k = 0; k < Shape::kHalf / 16; ++k) {
          multiply<T>(inner, further(operand(own_x), (half * 3 + k / 4) * kBoxBytes + k % 4 * 32),
                      further(operand(w_from), k / 4 * kBoxBytes + k % 4 * 32), half + k > 0);
        }
        commit_products();
      }
      pass_turn();
      if (consumer == 0 && warp == 0) {
        if (elect_lane()) {
          for (int half = 0; half < 2; ++half) {
            wait_barrier(ring.empty + 8 * (2 + half), phase ^ 1);
            load_out(half, chunk);
          }
        }
        __syncwarp();
      }
      // Constants are asked for long before they are needed: shared memory is busy with the other consumer's operands,
      // and a read takes hundreds of cycles.
      const uint32_t columns = base + Shape::kInColumns + chunk * (Shape::kChunk * 4) + lane % 4 * 8;
      float2 of_columns[Shape::kChunk / 8];
#pragma unroll
      for (int i = 0; i < Shape::kChunk / 8; ++i) of_columns[i] = load_now(columns + i * 32);
      const float2 by[2] = {scales_of_warp[lane / 4], scales_of_warp[lane / 4 + 8]};
      wait_read(0);

      uint32_t packed[Shape::kChunk / 16][4];  // the activations, as left operands of m16n8k16
#pragma unroll
      for (int piece = 0; piece < Shape::kChunk / 16; ++piece) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int at = 8 * piece + 2 * k;
          float2 none;
          packed[piece][k] = finish<T, kActivation, false>(inner[at], inner[at + 1], of_columns[2 * piece + k / 2],
                                                           by[k % 2], 0, true, none);
        }
      }
      wait_turn(1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        wait_barrier(ring.full + 8 * (2 + half), phase);
        const uint32_t w_from = ring.base + (2 + half) * Shape::kStageBytes;
        fence_registers();
#pragma unroll
        for (int k = 0; k < Shape::kChunk / 16; ++k)
          multiply_held<T>(y[half], packed[k], further(operand(w_from), k * 32), k > 0 || chunk > 0);
        commit_products();
      }
      pass_turn();
      if (consumer == 0 && warp == 0) {
        if (chunk + 1 < run.to && elect_lane()) {
          for (int half = 0; half < 2; ++half) {
            wait_barrier(ring.empty + 8 * half, phase);
            load_in(half, chunk + 1);
          }
        }
        __syncwarp();
      }
      wait_read(2);
    }

    // The next run's first stages: these before the others, which consumer 1 has read only now.
    const int next = i + 1 < range_now().runs() ? range_now().run(i + 1).from : -1;
    if (next >= 0) {
      for (int half = 0; half < 2; ++half) {
        refill(0, half, phase ^ 1, [&] {
          if (next > 0)
            load_in(half, next);
          else
            load_attended_w(half, 0);
        });
      }
      for (int stage = 2; stage < 4; ++stage) {
        if (next == 0) refill(1, stage, phase ^ 1, [&] { load_attended_w(stage, 0); });
      }
    }

    // What follows is 16 rows a warp. The lane is asked for again: what is made of it here would otherwise stand in
    // registers all along.
    {
      const int lane = lane_of_warp();
      if (run.to < work.chunks) {        // for the next cluster, beside x: its rows' scales and the accumulators
        if (next == 0) ask_rows(i + 1);  // on their way beside these stores
        if (lane < 16) __stcg(scales_left(blockIdx.x) + lane, scales_of_warp[lane]);
        float4* const held = reinterpret_cast<float4*>(work.held + size_t(blockIdx.x) * Shape::kHeldFloats) +
                             (consumer * 4 + warp) * (16 * Shape::kHidden / 4) + lane;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int at = 0; at < Shape::kHalf / 2; at += 4)
            __stcg(held + (half * Shape::kHalf / 2 + at) * 8,
                   float4{y[half][at], y[half][at + 1], y[half][at + 2], y[half][at + 3]});
        }
        __syncwarp();
        if (next != 0) set_own_flag();  // else that tile's first product gives these stores time
      } else {
        const int row = row_of(run.tile) + warp * 16;
        float2 by[2];  // without the activation's factor, a power of two
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          by[half] = scales_of_warp[lane / 4 + 8 * half];
          by[half].x *= 1.0f / activation_factor(kActivation), by[half].y *= 1.0f / activation_factor(kActivation);
        }
        finish_rows<T>(
            y, out_columns, by, own_x, warp, lane, [](int, uint32_t place) { return place; }, [](int) {},
            [&](int part, const float2(&sums)[2]) {
              store_part(&y_map, part, run.tile);
              if (of.y_sums != nullptr && lane % 4 == 0) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  const int own_row = row + lane / 4 + 8 * half;
                  if (own_row < of.rows) of.y_sums[size_t(own_row) * (Shape::kSumBytes / 8) + part] = sums[half];
                }
              }
            });
      }
    }
    if (next > 0 || (next == 0 && run.to == work.chunks)) ask_rows(i + 1);
  }
  if (lane == 0) wait_stores_done();
  // A block may leave only when its neighbours have multicast and arrived into it for the last time.
  __syncwarp();
  cluster_sync();
#endif
}

}  // namespace embert::hopper
