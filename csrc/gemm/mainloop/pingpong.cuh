// The ping-pong main loop: two consumers with a tile each. One multiplies during the other's epilogue, so the tensor
// cores do not wait for epilogues. Tiles are 128 × 128 (PingPongShape) or 64 × 256 (residual_pingpong.cuh).
//
// K is accumulated in order in one FP32 accumulator, so a row's bits depend only on the row and the weights.
#pragma once

#include "common/shared_memory.cuh"
#include "common/warp.cuh"
#include "gemm/mainloop/pipeline.cuh"
#include "ops/norm.h"

namespace embert::sm90 {

struct PingPongShape : StageShape<128> {
  static constexpr int kStages = 6;                  // as many as fit
  static constexpr int kBoxes = 2;                   // staging boxes of a consumer
  static constexpr int kColumnBytes = kColumns * 8;  // constants of a consumer
  static constexpr int kStaging = kStages * kStageBytes;
  static constexpr int kConstants = kStaging + 2 * kBoxes * kBoxBytes;
  static constexpr int kFull = kConstants + 2 * kColumnBytes;
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kOrder = kEmpty + 8 * kStages;
  static constexpr int kSharedBytes = kOrder + 2 * 8;
  static_assert(kSharedBytes <= kSharedLimit, "the limit of a block");
  static_assert(kColumns == kStatColumns, "a thread's constants are two columns'");

  // Rows of a consumer. Without ping-pong each consumer has half of every tile.
  template <bool kPingPong>
  static constexpr int kConsumerRows = kPingPong ? kRows : kRows / 2;
};

// Initializes the block's barriers. On return the cluster's other block has initialized its own too.
template <bool kPingPong, typename Shape = PingPongShape>
__device__ __forceinline__ void init_pingpong(uint32_t base) {
  const Pipeline pipeline{base, base + Shape::kFull, base + Shape::kEmpty};
  if (threadIdx.x == 0) {
    pipeline.init(Shape::kStages, kPingPong ? 4 : 8);
    for (int consumer = 0; consumer < 2; ++consumer) mbarrier_init(base + Shape::kOrder + 8 * consumer, 4);
    fence_mbarrier_init();
  }
  griddepcontrol_launch_dependents();
  wait_for_cluster_init();
}

// The default main loop, without overlapped work.
struct PlainMainloop {
  template <typename T, typename Shape, int kHalves, int kElements>
  __device__ __forceinline__ uint32_t multiply(const Pipeline& pipeline, PipelineState<Shape::kStages>& state,
                                               int steps, int consumer_row, int lane,
                                               SumOf<T> (&c)[kHalves][kElements]) const {
    return mainloop<T, Shape>(pipeline, state, steps, consumer_row, lane, c, [](int) {});
  }
};

// Runs a block's tiles, for all of its threads. `make_epilogue(consumer, consumer_row)` makes the epilogue of a
// consumer, whose rows begin at `consumer_row` of each tile:
//   first(tile)              once, with its first tile
//   before(tile)             before a tile's products, while the other consumer may still multiply
//   multiply(…)              a tile's products, as PlainMainloop
//   after(c, ordinal, next)  with a tile's products; `ordinal` counts the consumer's tiles; `next` is its next tile,
//                            or a number past the end
//   last()                   after all tiles
template <typename T, bool kPingPong, typename Shape = PingPongShape, typename Scheduler, typename MakeEpilogue>
__device__ __forceinline__ void pingpong_mainloop(uint32_t base, const Scheduler& tiles, int in,
                                                  const CUtensorMap& x_map, const CUtensorMap& w_map,
                                                  const MakeEpilogue& make_epilogue) {
  constexpr int kHalves = Shape::template kConsumerRows<kPingPong> / 64;  // wgmma's M is 64
  const Pipeline pipeline{base, base + Shape::kFull, base + Shape::kEmpty};
  const uint32_t order = base + Shape::kOrder;  // two barriers: a consumer may wait and multiply (pipeline.cuh)
  const int group = warp_index() / 4;
  const int steps = (in + kDepthOf<T> - 1) / kDepthOf<T>;
  if (group == 0) {
    warpgroup_reg_dealloc<40>();
    if (warp_index() == 0 && elect_one()) {
      TmaProducer<Shape, Scheduler, kDepthOf<T>> producer(pipeline, tiles, steps, x_map, w_map, w_map);
      for (int tile = tiles.first; tile < tiles.end; tile += tiles.stride) producer.copy(tile);
      producer.wait_all_read();
    }
  } else {
    warpgroup_reg_alloc<232>();
    const int consumer = group - 1, lane = threadIdx.x % 32;
    const int consumer_row = kPingPong ? 0 : consumer * Shape::template kConsumerRows<kPingPong>;
    auto epilogue = make_epilogue(consumer, consumer_row);
    int ordinal = kPingPong ? consumer : 0;  // index of the tile among the block's tiles
    int tile = tiles.first + ordinal * tiles.stride;
    if (tile < tiles.end) epilogue.first(tile);
    for (constexpr int kEvery = kPingPong ? 2 : 1; tile < tiles.end; tile += kEvery * tiles.stride, ordinal += kEvery) {
      epilogue.before(tile);
      PipelineState<Shape::kStages> state{uint32_t(ordinal * steps) % Shape::kStages,
                                          uint32_t(ordinal * steps) / Shape::kStages & 1};
      if (kPingPong && ordinal > 0) mbarrier_wait(order + 8 * consumer, (ordinal - 1) / 2 & 1);
      SumOf<T> c[kHalves][Shape::kColumns / 2];
      const uint32_t last_stage = epilogue.template multiply<T, Shape>(pipeline, state, steps, consumer_row, lane, c);
      if (kPingPong && lane == 0)
        mbarrier_arrive(order + 8 * (consumer ^ 1));  // the other one multiplies; these are in flight
      wgmma_wait_all(c);
      pipeline.has_read(last_stage, lane);  // at once: the other consumer waits for the next load into this stage
      epilogue.after(c, ordinal / kEvery, tile + kEvery * tiles.stride);
    }
    epilogue.last();
  }
}

// Runs a block of a kernel whose blocks have such tiles. Each consumer makes an Epilogue, from `arguments` too.
template <typename T, bool kPingPong, typename Epilogue, typename... Arguments>
__device__ __forceinline__ void run_pingpong(const CUtensorMap& x_map, const CUtensorMap& w_map,
                                             const CUtensorMap& y_map, const GemmArguments& args,
                                             const Arguments&... arguments) {
  extern __shared__ __align__(1024) uint8_t smem[];  // a swizzle pattern is 1 024 bytes
  if (threadIdx.x == 32) prefetch_tensor_maps(x_map, w_map, y_map);
  init_pingpong<kPingPong>(shared_address(smem));
  const TileScheduler<PingPongShape> tiles(args);
  pingpong_mainloop<T, kPingPong>(shared_address(smem), tiles, args.k, x_map, w_map,
                                  [&](int consumer, int consumer_row) {
                                    return Epilogue(smem, args, tiles, y_map, consumer, consumer_row, arguments...);
                                  });
}

}  // namespace embert::sm90
