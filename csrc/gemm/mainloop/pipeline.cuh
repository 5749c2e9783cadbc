// The pipeline: stages in shared memory. The producer, one thread, fills them with tiles of x and W by TMA; the
// consumers multiply from them.
//
// Barriers. A stage has two mbarriers. `full` completes when the bytes of the stage have arrived. `empty` completes
// when all warps that read the stage have arrived. The warps of both blocks of a cluster count, because each block's
// multicast of W writes into the stages of both blocks.
//
// Phases. A barrier's phase flips when it completes, and a wait names the parity of the phase that it waits for.
// Stages are used cyclically. A consumer starts with parity 0 and flips it when it wraps around to stage 0. The
// producer starts with parity 1, which counts as complete before the first use: its first pass finds every stage
// empty.
//
// Order. A parity cannot distinguish a phase from the one after the next. So a warp may wait for a stage only while
// it cannot be two uses late. Consumers in ping-pong therefore order their waits too: two more mbarriers, `order`,
// say which consumer may wait and multiply (pingpong.cuh, feed_forward.cuh).
//
// Exit. A block may exit only when no other block writes to it any more, neither copies nor arrivals
// (TmaProducer::wait_all_read).
#pragma once

#include <cstdint>

#include "common/barrier.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/tma.cuh"
#include "gemm/heuristics.h"
#include "gemm/mainloop/tile_scheduler.cuh"

namespace embert::sm90 {

constexpr int kDepth = 64;                // columns of K in a stage: 128 bytes, one swizzled row, of 16-bit elements
constexpr int kBoxBytes = 64 * 128;       // 64 rows of 64 columns
constexpr int kSharedLimit = 227 * 1024;  // shared memory that a block of sm_90 can have

// A stage: tiles of x [kRows, kDepth] and W [kColumns, kDepth].
template <int kColumnsValue, int kConsumersValue = 2>
struct StageShape {
  static constexpr int kConsumers = kConsumersValue;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kColumns = kColumnsValue;
  static constexpr int kXBytes = kRows * kDepth * 2;
  static constexpr int kWBytes = kColumns * kDepth * 2;
  static constexpr int kStageBytes = kXBytes + kWBytes;
  static constexpr int kWShare = kColumns / kCluster;  // rows of W that a block loads
  static_assert(kStageBytes % 1024 == 0, "a stage starts on a swizzle pattern");
};

// The stages at `base` and their barriers, 8 bytes a stage.
struct Pipeline {
  uint32_t base, full, empty;

  __device__ __forceinline__ void init(int stages, int readers) const {
    for (int stage = 0; stage < stages; ++stage) {
      mbarrier_init(full + 8 * stage, 1);
      mbarrier_init(empty + 8 * stage, readers * kCluster);
    }
  }
  // For a whole warp: signals both blocks that it has read the stage.
  __device__ __forceinline__ void has_read(uint32_t stage, int lane) const {
    if (lane < kCluster) mbarrier_arrive_cluster(empty + 8 * stage, lane);
  }
};

// The pipeline state of a consumer or of the producer: the next stage, and the parity of the phase to wait for.
template <int kStages>
struct PipelineState {
  uint32_t stage, phase;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// The main loop: c = x · Wᵀ over the next `steps` stages, for kHalves times 64 rows of a tile from `consumer_row` on. A
// stage is released one step later, when its products are complete. The products of the last stage are still in
// flight at the end; its index is returned. `committed(step)` runs after a step's products are committed.
template <typename T, typename Shape, int kHalves, int kElements, typename Committed>
__device__ __forceinline__ uint32_t mainloop(const Pipeline& pipeline, PipelineState<Shape::kStages>& state, int steps,
                                             int consumer_row, int lane, SumOf<T> (&c)[kHalves][kElements],
                                             const Committed& committed) {
  uint32_t last_stage = state.stage;
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait(pipeline.full + 8 * state.stage, state.phase);
    const uint32_t x_from = pipeline.base + state.stage * Shape::kStageBytes + consumer_row * 128;
    const uint32_t w_from = pipeline.base + state.stage * Shape::kStageBytes + Shape::kXBytes;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {  // 32 bytes each, for every type
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        wgmma<T>(c[half], advance_descriptor(make_descriptor(x_from), half * kBoxBytes + k * 32),
                 advance_descriptor(make_descriptor(w_from), k * 32), step + k > 0);
      }
    }
    wgmma_commit();
    if (step > 0) {
      wgmma_wait<1>();  // the stage before this one has been read
      pipeline.has_read(last_stage, lane);
    }
    committed(step);
    last_stage = state.stage;
    state.advance();
  }
  return last_stage;
}

// Fills the pipeline with the operands of the block's tiles, in order; for one thread. kColumns: columns of K in a
// stage.
template <typename Shape, typename Scheduler = TileScheduler<Shape>, int kColumns = kDepth>
class TmaProducer {
 public:
  // Weights do not depend on an earlier kernel, so the first copies of W start while that kernel still runs.
  // `narrow_w_map`: for tiles of half the columns.
  __device__ __forceinline__ TmaProducer(const Pipeline& pipeline, const Scheduler& tiles, int steps,
                                         const CUtensorMap& x_map, const CUtensorMap& w_map,
                                         const CUtensorMap& narrow_w_map)
      : pipeline_(pipeline), tiles_(tiles), x_map_(x_map), w_map_(w_map), narrow_w_map_(narrow_w_map), steps_(steps) {
    early_ = tiles.first < tiles.end ? min(steps, Shape::kStages) : 0;
    for (int step = 0; step < early_; ++step)
      load_w(step, step, tiles.column_of(tiles.first), tiles.columns_of(tiles.first));
    griddepcontrol_wait();
  }

  __device__ __forceinline__ void copy(int tile) {
    const int row = tiles_.row_of(tile), column = tiles_.column_of(tile), columns = tiles_.columns_of(tile);
    for (int step = 0; step < steps_; ++step) {
      mbarrier_wait(pipeline_.empty + 8 * state_.stage, state_.phase);
      if (early_ > 0)
        --early_;
      else
        load_w(state_.stage, step, column, columns);
      load_rows(x_map_, place(), step * kColumns, row);
      state_.advance();
    }
  }

  // Waits for the last arrivals of the cluster's other block. Its last copies have arrived already: this block's
  // consumers waited for them.
  __device__ __forceinline__ void wait_all_read() {
    for (int i = 0; i < Shape::kStages; ++i) {
      mbarrier_wait(pipeline_.empty + 8 * state_.stage, state_.phase);
      state_.advance();
    }
  }

  // A step that is not one of K's: boxes of 64 columns from `column` on, with all rows of the tile.
  __device__ __forceinline__ void copy_boxes(const CUtensorMap& map, int boxes, int row, int column) {
    mbarrier_wait(pipeline_.empty + 8 * state_.stage, state_.phase);
    mbarrier_arrive_expect_tx(pipeline_.full + 8 * state_.stage, boxes * Shape::kRows * 128);
    for (int box = 0; box < boxes; ++box) load_rows(map, place() + box * Shape::kRows * 128, column + box * 64, row);
    state_.advance();
  }

 private:
  __device__ __forceinline__ uint32_t place() const { return pipeline_.base + state_.stage * Shape::kStageBytes; }
  // Nothing reads x or the residual again soon. With int8 the L2 cache evicts them first, and this kernel's output
  // stays there for the next kernel. With 16 bits that gains nothing.
  __device__ __forceinline__ void load_rows(const CUtensorMap& map, uint32_t to, int column, int row) const {
    const auto load = kColumns == kDepth ? tma_load : tma_load_evict_first;
    load(&map, to, pipeline_.full + 8 * state_.stage, column, row);
  }
  __device__ __forceinline__ void load_w(uint32_t stage, int step, int column, int columns) const {
    const int share = tiles_.rank * (columns / kCluster);
    mbarrier_arrive_expect_tx(pipeline_.full + 8 * stage, Shape::kXBytes + columns * 128);
    tma_load_multicast(uint16_t((1 << kCluster) - 1), columns == Shape::kColumns ? &w_map_ : &narrow_w_map_,
                       pipeline_.base + stage * Shape::kStageBytes + Shape::kXBytes + share * 128,
                       pipeline_.full + 8 * stage, step * kColumns, column + share);
  }

  const Pipeline& pipeline_;
  const Scheduler& tiles_;
  const CUtensorMap& x_map_;
  const CUtensorMap& w_map_;
  const CUtensorMap& narrow_w_map_;
  int steps_;
  int early_;  // stages whose W is already in flight
  PipelineState<Shape::kStages> state_{0, 1};
};

}  // namespace embert::sm90
