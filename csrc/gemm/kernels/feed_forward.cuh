// The whole feed-forward layer of narrow models, hidden size 384, in one kernel for many rows:
//
//   y[rows, 384] = activation(x · W_inᵀ + b_in) · W_outᵀ + b_out + x,   W_in [inner, 384], W_out [384, inner]
//
// Two GEMMs move the inner activations twice: 162 of 464 MB of a layer of MiniLM with 26 368 rows. Here they stay in
// registers. A consumer multiplies 64 rows of x, which stay in shared memory, by 64 rows of W_in, and applies the
// activation. The result is wgmma's left operand for 64 columns of W_out: a chunk. The accumulators of y, [64, 384] a
// consumer, stay in registers over all chunks. They are 192 of a thread's 255 registers. For this reason no wider model
// fits, a block has two consumers and no producer warp group, and W comes in chunks of 64 inner activations.
//
// The consumers run in ping-pong, product by product: one applies its activation while the other multiplies.
//
// Clusters share the work in units of a chunk (feed_forward_range.h). A cluster starts with the first chunks of its
// last tile and leaves the accumulators in memory. The next cluster does the rest of that tile last, so it hardly
// waits, and it never waits for a later cluster. The chunks of a tile are still added in order, in FP32, and the inner
// activations are rounded as if stored: the bits are those of two GEMMs. LayerNorms are folded in as there
// (EPILOGUES.md), and x's row statistics serve both. x in shared memory is also the residual, and y replaces it there
// before it is stored.
#pragma once

#include "common/barrier.cuh"
#include "common/launch.cuh"
#include "common/shared_memory.cuh"
#include "common/warp.cuh"
#include "gemm/epilogue/finish.cuh"
#include "gemm/epilogue/row_stats.cuh"
#include "gemm/kernels/feed_forward_range.h"
#include "gemm/mainloop/pipeline.cuh"

namespace embert::sm90 {

struct FeedForwardShape {
  static constexpr int kHidden = 384;
  static constexpr int kRows = 128;     // 64 a consumer
  static constexpr int kThreads = 256;  // two consumers
  static constexpr int kChunk = 64;     // inner activations in a chunk
  static constexpr int kBoxes = kHidden / 64;
  static constexpr int kXBytes = kBoxes * kBoxBytes;  // of a consumer
  // A stage of the pipeline: half of K of a chunk's rows of W_in, or half of the rows of a chunk's columns of W_out.
  static constexpr int kHalf = kHidden / 2;
  static constexpr int kStageBytes = kHalf * kChunk * 2;
  static constexpr int kStages = 4;       // of a chunk; each has a fixed address, which saves registers
  static constexpr int kMaxInner = 3072;  // columns whose constants stay in shared memory
  static constexpr int kPipeline = 2 * kXBytes;
  static constexpr int kInColumns = kPipeline + kStages * kStageBytes;
  static constexpr int kOutColumns = kInColumns + kMaxInner * 8;
  static constexpr int kNexts = kOutColumns + kHidden * 8;  // the next LayerNorm's gammas
  static constexpr int kScales = kNexts + kHidden * 2;      // of the rows, a float2 each
  static constexpr int kFull = kScales + kRows * 8;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kXFull = kEmpty + 8 * kStages;  // an mbarrier for each consumer
  static constexpr int kOrder = kXFull + 2 * 8;
  static constexpr int kSharedBytes = kOrder + 2 * 8;
  static_assert(kSharedBytes <= kSharedLimit, "the limit of a block");

  static constexpr int kPartialFloats = kRows * kHidden;  // accumulators that a block leaves
  static constexpr int kFlags = kThreads / 32;            // signals that a warp's accumulators are in memory
};

// GemmArguments describe the second GEMM; this describes the first one, and the exchange between clusters.
struct FeedForwardArguments {
  const void* columns;  // a ColumnPair for every two columns
  int chunks;
  float* partial;  // [blocks, kPartialFloats]
  int* flags;      // [blocks, kFlags]; 0 before and after
};

template <typename T, Activation kActivation, bool kPrescaledRows>
__global__ void __launch_bounds__(FeedForwardShape::kThreads, 1)
    feed_forward_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap in_map,
                        const __grid_constant__ CUtensorMap out_map, const __grid_constant__ CUtensorMap y_map,
                        const GemmArguments args, const FeedForwardArguments work) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = FeedForwardShape;
  extern __shared__ __align__(1024) uint8_t smem[];  // a swizzle pattern is 1 024 bytes
  const uint32_t base = shared_address(smem);
  const Pipeline pipeline{base + Shape::kPipeline, base + Shape::kFull, base + Shape::kEmpty};
  const uint32_t order = base + Shape::kOrder;  // two barriers: a consumer may wait and multiply (pipeline.cuh)
  const int consumer = warp_index() / 4, warp = warp_index() % 4, lane = threadIdx.x % 32;
  const uint32_t x_full = base + Shape::kXFull + 8 * consumer;
  const uint32_t consumer_x = base + consumer * Shape::kXBytes;
  using InPair = ColumnPair<false, kPrescaledRows>;
  InPair* const in_columns = reinterpret_cast<InPair*>(smem + Shape::kInColumns);
  float4* const out_columns = reinterpret_cast<float4*>(smem + Shape::kOutColumns);
  uint32_t* const next_gammas_smem = reinterpret_cast<uint32_t*>(smem + Shape::kNexts);
  float2* const scales_of_warp = reinterpret_cast<float2*>(smem + Shape::kScales) + consumer * 64 + warp * 16;

  if (threadIdx.x == 32) prefetch_tensor_maps(in_map, out_map, x_map, y_map);
  if (threadIdx.x == 0) {
    pipeline.init(Shape::kStages, 8);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(base + Shape::kXFull + 8 * i, 1);
      mbarrier_init(order + 8 * i, 4);
    }
    fence_mbarrier_init();
  }
  griddepcontrol_launch_dependents();
  wait_for_cluster_init();

  const int rank = cluster_rank();
  const int tiles = (args.m + Shape::kRows * kCluster - 1) / (Shape::kRows * kCluster);  // tiles of a cluster
  const FeedForwardRange range = FeedForwardRange::of(tiles, work.chunks, blockIdx.x / kCluster, gridDim.x / kCluster);
  const int runs = range.runs();
  const auto row_of = [&](int tile) {  // the consumer's first row
    return ((args.backwards ? tiles - 1 - tile : tile) * kCluster + rank) * Shape::kRows + consumer * 64;
  };

  // TMA loads, each for one thread. A block loads half of W for both blocks.
  constexpr uint16_t kBoth = (1 << kCluster) - 1;
  const auto load_in = [&](int half, int chunk) {
    constexpr int kShare = Shape::kChunk / kCluster;
    const uint32_t full = pipeline.full + 8 * half;
    mbarrier_arrive_expect_tx(full, Shape::kStageBytes);
#pragma unroll
    for (int box = 0; box < Shape::kHalf / 64; ++box)
      tma_load_multicast(kBoth, &in_map,
                         pipeline.base + half * Shape::kStageBytes + box * kBoxBytes + rank * kShare * 128, full,
                         half * Shape::kHalf + box * 64, chunk * Shape::kChunk + rank * kShare);
  };
  const auto load_out = [&](int half, int chunk) {
    constexpr int kShare = Shape::kHalf / kCluster;
    const uint32_t full = pipeline.full + 8 * (2 + half);
    mbarrier_arrive_expect_tx(full, Shape::kStageBytes);
    tma_load_multicast(kBoth, &out_map, pipeline.base + (2 + half) * Shape::kStageBytes + rank * kShare * 128, full,
                       chunk * Shape::kChunk, half * Shape::kHalf + rank * kShare);
  };
  const auto load_x = [&](int tile) {
    mbarrier_arrive_expect_tx(x_full, Shape::kXBytes);
    for (int box = 0; box < Shape::kBoxes; ++box)
      tma_load(&x_map, consumer_x + box * kBoxBytes, x_full, box * 64, row_of(tile));
  };
  if (consumer == 0 && warp == 0 && elect_one()) {
    for (int half = 0; half < 2; ++half) load_in(half, range.run(0).from);
    for (int half = 0; half < 2; ++half) load_out(half, range.run(0).from);
  }
  if (threadIdx.x < Shape::kHidden / 2) {
    out_columns[threadIdx.x] = __ldg(column_pairs<true, kPrescaledRows>(args) + threadIdx.x);
    if constexpr (kPrescaledRows) next_gammas_smem[threadIdx.x] = __ldg(next_gamma_pairs(args) + threadIdx.x);
  }
  for (int i = threadIdx.x; i < work.chunks * Shape::kChunk / 2; i += Shape::kThreads)
    in_columns[i] = __ldg(static_cast<const InPair*>(work.columns) + i);
  griddepcontrol_wait();
  if (warp == 0 && elect_one()) load_x(range.run(0).tile);
  __syncthreads();  // the constants are in shared memory

  // Consumers take a chunk's first product in ping-pong, then its second. Their waits for stages have the same order.
  uint32_t order_phase = consumer ^ 1;
  const auto wait_order = [&] {
    mbarrier_wait(order + 8 * consumer, order_phase);
    order_phase ^= 1;
  };
  const auto pass_order = [&] {
    if (lane_index() == 0) mbarrier_arrive(order + 8 * (consumer ^ 1));
  };
  const auto wait_read = [&](int stage) {  // waits for the products of two stages
    wgmma_wait<1>();
    pipeline.has_read(stage, lane_index());
    wgmma_wait<0>();
    pipeline.has_read(stage + 1, lane_index());
  };

  uint32_t phase = 0;
  for (int i = 0; i < runs; ++i) {
    const FeedForwardRun run = range.run(i);
    {
      float2 scale[2] = {{activation_factor(kActivation), 0.0f}, {activation_factor(kActivation), 0.0f}};
      if (args.row_stats != nullptr) {
        RowStats row_stats;
        row_stats.load(args, row_of(run.tile) + warp * 16, lane);
        row_stats.scales(args, activation_factor(kActivation), lane, scale);
      }
      if (lane % 4 == 0) scales_of_warp[lane / 4] = scale[0], scales_of_warp[lane / 4 + 8] = scale[1];
      __syncwarp();
    }
    float y[2][Shape::kHalf / 2];  // 192 columns each
    if (run.from > 0) {
      const int lane = lane_index();
      int* const flag = work.flags + (blockIdx.x - kCluster) * Shape::kFlags + consumer * 4 + warp;
      if (lane == 0) wait_flag(flag);
      __syncwarp();
      const float4* const partial = reinterpret_cast<const float4*>(work.partial) +
                                    size_t(blockIdx.x - kCluster) * (Shape::kPartialFloats / 4) +
                                    (consumer * 4 + warp) * (16 * Shape::kHidden / 4) + lane;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int element = 0; element < Shape::kHalf / 2; element += 4) {
          const float4 packed4 = __ldcg(partial + (half * Shape::kHalf / 2 + element) * 8);
          y[half][element] = packed4.x, y[half][element + 1] = packed4.y, y[half][element + 2] = packed4.z,
          y[half][element + 3] = packed4.w;
        }
      }
      __syncwarp();
      if (lane == 0) *flag = 0;
    }
    mbarrier_wait(x_full, i & 1);

    const int next = i + 1 < runs ? range.run(i + 1).from : -1;
    for (int chunk = run.from; chunk < run.to; ++chunk, phase ^= 1) {
      wait_order();
      float inner[Shape::kChunk / 2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mbarrier_wait(pipeline.full + 8 * half, phase);
        const uint32_t w_from = pipeline.base + half * Shape::kStageBytes;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Shape::kHalf / 16; ++k) {
          wgmma<T>(inner, advance_descriptor(make_descriptor(consumer_x), (half * 3 + k / 4) * kBoxBytes + k % 4 * 32),
                   advance_descriptor(make_descriptor(w_from), k / 4 * kBoxBytes + k % 4 * 32), half + k > 0);
        }
        wgmma_commit();
      }
      pass_order();
      // Constants are loaded long before they are needed: shared memory is busy with the other consumer's operands, and
      // a load takes hundreds of cycles. All loads are in flight at once; with two constants per column only half of
      // them, so that fewer registers spill.
      const uint32_t columns =
          base + Shape::kInColumns + (chunk * (Shape::kChunk / 2) + lane % 4) * int(sizeof(InPair));
      constexpr int kPairs = Shape::kChunk / 8, kAhead = kPrescaledRows ? kPairs / 2 : kPairs;
      InPair column_constants[kPairs];
      const auto prefetch_columns = [&](int i) {
        ld_shared(columns + i * 4 * int(sizeof(InPair)), column_constants[i]);
      };
#pragma unroll
      for (int i = 0; i < kAhead; ++i) prefetch_columns(i);
      const float2 scale_shift[2] = {scales_of_warp[lane / 4], scales_of_warp[lane / 4 + 8]};
      wait_read(0);
      fence_accumulators(inner);

      uint32_t packed[Shape::kChunk / 16][4];  // the activations, as left operands of m16n8k16
#pragma unroll
      for (int piece = 0; piece < Shape::kChunk / 16; ++piece) {
#pragma unroll
        for (int i = 2 * piece + kAhead; i < min(2 * piece + kAhead + 2, kPairs); ++i) prefetch_columns(i);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int element = 8 * piece + 2 * k;
          float2 none;
          packed[piece][k] = finish<T, kActivation, false, kPrescaledRows>(inner[element], inner[element + 1],
                                                                           column_constants[2 * piece + k / 2],
                                                                           scale_shift[k % 2], 0, 0, true, none);
        }
      }
      const int next_chunk = chunk + 1 < run.to ? chunk + 1 : next;
      wait_order();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        mbarrier_wait(pipeline.full + 8 * (2 + half), phase);
        const uint32_t w_from = pipeline.base + (2 + half) * Shape::kStageBytes;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Shape::kChunk / 16; ++k)
          wgmma_rs<T>(y[half], packed[k], advance_descriptor(make_descriptor(w_from), k * 32), chunk + k > 0);
        wgmma_commit();
      }
      pass_order();
      // W_in is free after consumer 1's first product, so consumer 0 loads the next one while it waits. W_out is free
      // when consumer 1 has read it, so consumer 1 loads it, one product earlier than consumer 0 could.
      const auto fetch = [&](int stage, const auto& load) {
        if (next_chunk >= 0 && elect_one()) {
          for (int half = 0; half < 2; ++half) {
            mbarrier_wait(pipeline.empty + 8 * (stage + half), phase);
            load(half, next_chunk);
          }
        }
        __syncwarp();
      };
      if (consumer == 0 && warp == 0) fetch(0, load_in);
      wait_read(2);
      if (consumer == 1 && warp == 0) fetch(2, load_out);
    }

    fence_accumulators(y);

    // From here on a warp has 16 rows. The lane index is read again, so that no value derived from it occupies a
    // register during the products.
    {
      const int lane = lane_index();
      if (run.to < work.chunks) {
        float4* const partial = reinterpret_cast<float4*>(work.partial) +
                                size_t(blockIdx.x) * (Shape::kPartialFloats / 4) +
                                (consumer * 4 + warp) * (16 * Shape::kHidden / 4) + lane;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int element = 0; element < Shape::kHalf / 2; element += 4)
            __stcg(partial + (half * Shape::kHalf / 2 + element) * 8,
                   float4{y[half][element], y[half][element + 1], y[half][element + 2], y[half][element + 3]});
        }
        __syncwarp();
        if (lane == 0) set_flag(work.flags + blockIdx.x * Shape::kFlags + consumer * 4 + warp);
      } else {
        const int row = row_of(run.tile) + warp * 16;
        float2 scale_shift[2];  // without the activation's factor, a power of two
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          scale_shift[half] = scales_of_warp[lane / 4 + 8 * half];
          scale_shift[half].x *= 1.0f / activation_factor(kActivation),
              scale_shift[half].y *= 1.0f / activation_factor(kActivation);
        }
        constexpr int kPieces = kStatColumns / 16;
#pragma unroll
        for (int part = 0; part < Shape::kHidden / kStatColumns; ++part) {
          float2 sums[2][kPieces];
#pragma unroll
          for (int in_part = 0; in_part < kPieces; ++in_part) {
            const int piece = part * kPieces + in_part;  // of 16 columns
            const uint32_t box_at = consumer_x + piece / 4 * kBoxBytes;
            const uint32_t at_x = box_at + swizzle_128b(warp * 16 + lane % 16, 2 * (piece % 4) + lane / 16);
            const float4 column_constants[2] = {out_columns[piece * 8 + lane % 4],
                                                out_columns[piece * 8 + lane % 4 + 4]};
            uint32_t residuals[4], stored[4], next_gammas[2] = {};
            if constexpr (kPrescaledRows)
              next_gammas[0] = next_gammas_smem[piece * 8 + lane % 4],
              next_gammas[1] = next_gammas_smem[piece * 8 + lane % 4 + 4];
            ldmatrix_x4(residuals, at_x);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
              const int element = 8 * (piece % 12) + 4 * (k / 2) + 2 * (k % 2);
              stored[k] = finish<T, Activation::kNone, true, kPrescaledRows>(
                  y[piece / 12][element], y[piece / 12][element + 1], column_constants[k / 2], scale_shift[k % 2],
                  residuals[k], next_gammas[k / 2], k < 2, sums[k % 2][in_part]);
            }
            stmatrix_x4(at_x, stored);
            if (piece % 4 == 3) store_box(y_map, box_at + warp * 16 * 128, piece / 4 * 64, row, lane);
          }
          if (args.y_stats != nullptr)
            store_row_stats<kStatColumns>(args, sums, args.m, row + lane / 4, part * kStatColumns, lane);
        }
        if (lane == 0) tma_store_wait_read<0>();
      }
    }
    named_barrier_sync(kConsumerBarrier + consumer, 128);  // all threads have read x
    if (warp == 0 && i + 1 < runs && elect_one()) load_x(range.run(i + 1).tile);
  }
  // Waits for the last arrivals of the cluster's other block (pipeline.cuh).
  if (warp == 0 && elect_one()) {
    for (int half = 0; half < 2; ++half) mbarrier_wait(pipeline.empty + 8 * (2 * consumer + half), phase ^ 1);
  }
#else
  EMBERT_TRAP("feed_forward_kernel");
#endif
}

}  // namespace embert::sm90
