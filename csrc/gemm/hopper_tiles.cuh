// What both kernels for many rows have in common: the order of tiles, and the thread that copies them.
//
// Blocks are persistent and come in clusters of two, which lie below each other in y: each has rows of its own and
// shares the tile of W, of which each fetches a half for both (multicast). Larger clusters were slower
// (../EPILOGUES.md).
#pragma once

#include "hopper_epilogue.cuh"

namespace embert::hopper {

constexpr int kManyRowsThreads = 384;  // a warpgroup that copies, two that multiply ("consumers")
constexpr int kCluster = 2;
constexpr int kDepth = 64;                // of K, a stage: 128 bytes, one swizzled row
constexpr int kBoxBytes = 64 * 128;       // 64 rows of 64 columns
constexpr int kSharedLimit = 227 * 1024;  // of a block of sm_90

// A stage of the ring: a tile of x [kRows, kDepth], then one of W [kColumns, kDepth].
template <int kRowsValue, int kColumnsValue>
struct StageShape {
  static constexpr int kRows = kRowsValue;        // of x, a block's tile
  static constexpr int kColumns = kColumnsValue;  // of y
  static constexpr int kXBytes = kRows * kDepth * 2;
  static constexpr int kWBytes = kColumns * kDepth * 2;
  static constexpr int kStageBytes = kXBytes + kWBytes;
  static constexpr int kWShare = kColumns / kCluster;  // rows of W a block fetches
  static_assert(kStageBytes % 1024 == 0, "a stage starts on a swizzle pattern");
};

// The tiles of a block. Columns run fastest: the blocks at work share rows of x, and W stays in the L2 cache.
template <typename Shape>
struct Tiles {
  int columns, rows;  // in tiles, of a cluster
  int first, stride;
  int rank;  // of the block in its cluster
  bool backwards;

  __device__ __forceinline__ Tiles(const GemmArguments& of, int rank) : rank(rank), backwards(of.backwards) {
    columns = (of.out + Shape::kColumns - 1) / Shape::kColumns;
    rows = (of.rows + Shape::kRows * kCluster - 1) / (Shape::kRows * kCluster);
    first = blockIdx.x / kCluster;
    stride = gridDim.x / kCluster;
  }
  __device__ __forceinline__ int count() const { return columns * rows; }
  __device__ __forceinline__ int row_of(int tile) const {
    const int at = backwards ? rows - 1 - tile / columns : tile / columns;
    return (at * kCluster + rank) * Shape::kRows;
  }
  __device__ __forceinline__ int column_of(int tile) const { return tile % columns * Shape::kColumns; }
};

// The ring of stages at `base` and its barriers: `full` counts bytes, `empty` the warps that have read a stage, in both
// blocks of the cluster.
struct Ring {
  uint32_t base, full, empty;

  __device__ __forceinline__ void init(int stages, int readers) const {
    for (int stage = 0; stage < stages; ++stage) {
      init_barrier(full + 8 * stage, 1);
      init_barrier(empty + 8 * stage, readers * kCluster);
    }
  }
  // By a whole warp of a reader.
  __device__ __forceinline__ void has_read(uint32_t stage, int lane) const {
    if (lane < kCluster) arrive_in_cluster(empty + 8 * stage, lane);
  }
};

// Fills the ring with what the block's tiles need, in their order; by one thread. A residual follows as steps of its
// own.
template <typename Shape>
__device__ __forceinline__ void copy_tiles(const Ring& ring, const Tiles<Shape>& tiles, int steps,
                                           const CUtensorMap& x_map, const CUtensorMap& w_map,
                                           const CUtensorMap& residual_map) {
  uint32_t stage = 0, phase = 1;  // the first pass over the ring finds every stage empty
  const auto advance = [&] {
    if (++stage == Shape::kStages) stage = 0, phase ^= 1;
  };
  const auto load_w = [&](uint32_t at, int step, int column) {
    const uint32_t to = ring.base + at * Shape::kStageBytes + Shape::kXBytes + tiles.rank * Shape::kWShare * 128;
    arrive_expecting(ring.full + 8 * at, Shape::kStageBytes);
    load_box_for(uint16_t((1 << kCluster) - 1), &w_map, to, ring.full + 8 * at, step * kDepth,
                 column + tiles.rank * Shape::kWShare);
  };
  prefetch_map(&x_map);
  prefetch_map(&w_map);
  // Weights depend on no earlier kernel: the first ones are on their way while that one still runs.
  const int early = tiles.first < tiles.count() ? min(steps, Shape::kStages) : 0;
  for (int step = 0; step < early; ++step) load_w(step, step, tiles.column_of(tiles.first));
  wait_for_earlier_kernels();
  for (int tile = tiles.first; tile < tiles.count(); tile += tiles.stride) {
    const int row = tiles.row_of(tile), column = tiles.column_of(tile);
    for (int step = 0; step < steps; ++step) {
      wait_barrier(ring.empty + 8 * stage, phase);
      if (tile != tiles.first || step >= early) load_w(stage, step, column);
      load_box(&x_map, ring.base + stage * Shape::kStageBytes, ring.full + 8 * stage, step * kDepth, row);
      advance();
    }
    for (int step = 0; step < Shape::kResidualSteps; ++step) {
      wait_barrier(ring.empty + 8 * stage, phase);
      arrive_expecting(ring.full + 8 * stage, Shape::kRows * Shape::kResidualColumns * 2);
      for (int box = 0; box < Shape::kResidualColumns / 64; ++box) {
        load_box(&residual_map, ring.base + stage * Shape::kStageBytes + box * Shape::kRows * 128,
                 ring.full + 8 * stage, column + step * Shape::kResidualColumns + box * 64, row);
      }
      advance();
    }
  }
}

}  // namespace embert::hopper
