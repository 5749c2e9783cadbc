// What both kernels for many rows have in common.
//
// Blocks are persistent and come in clusters of two, which lie below each other in y: each has rows of its own and
// shares the tile of W, of which each fetches a half for both (multicast). Larger clusters were slower
// (../EPILOGUES.md); side by side, sharing rows of x, gained whole forwards nothing (docs/cuda-notes.md).
#pragma once

#include "hopper_epilogue.cuh"

namespace embert::hopper {

constexpr int kCluster = 2;
constexpr int kDepth = 64;                // of K, a stage: 128 bytes, one swizzled row
constexpr int kBoxBytes = 64 * 128;       // 64 rows of 64 columns
constexpr int kSharedLimit = 227 * 1024;  // of a block of sm_90

// A stage of the ring: tiles of x [kRows, kDepth] and W [kColumns, kDepth].
template <int kColumnsValue, int kConsumersValue = 2>
struct StageShape {
  static constexpr int kConsumers = kConsumersValue;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kColumns = kColumnsValue;
  static constexpr int kXBytes = kRows * kDepth * 2;
  static constexpr int kWBytes = kColumns * kDepth * 2;
  static constexpr int kStageBytes = kXBytes + kWBytes;
  static constexpr int kWShare = kColumns / kCluster;  // rows of W a block fetches
  static_assert(kStageBytes % 1024 == 0, "a stage starts on a swizzle pattern");
};

// The tiles of a block: first, first + stride … before end. Columns run fastest: the blocks at work share rows of x,
// and W stays in the L2 cache. With blocks that keep to rows of their own, 26 368 rows took 48 µs instead of 43 (384 to
// 1 152), 183 instead of 135 (768 to 2 304).
// A division is a multiplication here: two real ones a tile, with four copies of a rare path in ManyRowsSums, made QKV
// and FFN in 2 to 3 % longer.
template <typename Shape>
struct Tiles {
  int columns, rows;         // in tiles, of a cluster
  uint32_t columns_inverse;  // GemmArguments::columns_inverse
  int first, stride, end;
  int rank;  // of the block in its cluster
  bool backwards;

  __device__ __forceinline__ explicit Tiles(const GemmArguments& of, int /* all are whole */ = 0)
      : columns_inverse(of.columns_inverse), backwards(of.backwards) {
    rank = cluster_rank();
    columns = (of.out + Shape::kColumns - 1) / Shape::kColumns;
    rows = (of.rows + Shape::kRows * kCluster - 1) / (Shape::kRows * kCluster);
    first = blockIdx.x / kCluster;
    stride = gridDim.x / kCluster;
    end = columns * rows;
  }
  __device__ __forceinline__ int row_of(int tile) const {
    const int at = backwards ? rows - 1 - row_tile(tile) : row_tile(tile);
    return (at * kCluster + rank) * Shape::kRows;
  }
  __device__ __forceinline__ int column_of(int tile) const {
    return (tile - row_tile(tile) * columns) * Shape::kColumns;
  }
  __device__ __forceinline__ static constexpr int columns_of(int /* any tile */) { return Shape::kColumns; }
  __device__ __forceinline__ int row_tile(int tile) const { return __umulhi(2 * tile, columns_inverse); }
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

// Fills the ring with what the block's tiles need, in their order; by one thread.
template <typename Shape, typename AllTiles = Tiles<Shape>>
class Copier {
 public:
  // Weights depend on no earlier kernel: the first ones are on their way while that one still runs. `narrow_w_map`: for
  // tiles of half the columns.
  __device__ __forceinline__ Copier(const Ring& ring, const AllTiles& tiles, int steps, const CUtensorMap& x_map,
                                    const CUtensorMap& w_map, const CUtensorMap& narrow_w_map)
      : ring_(ring), tiles_(tiles), x_map_(x_map), w_map_(w_map), narrow_w_map_(narrow_w_map), steps_(steps) {
    early_ = tiles.first < tiles.end ? min(steps, Shape::kStages) : 0;
    for (int step = 0; step < early_; ++step)
      load_w(step, step, tiles.column_of(tiles.first), tiles.columns_of(tiles.first));
    wait_for_earlier_kernels();
  }

  __device__ __forceinline__ void copy(int tile) {
    const int row = tiles_.row_of(tile), column = tiles_.column_of(tile), columns = tiles_.columns_of(tile);
    for (int step = 0; step < steps_; ++step) {
      wait_barrier(ring_.empty + 8 * stage_, phase_);
      if (early_ > 0)
        --early_;
      else
        load_w(stage_, step, column, columns);
      load_box(&x_map_, place(), ring_.full + 8 * stage_, step * kDepth, row);
      advance();
    }
  }

  // A block may leave only when nobody will write into it again: not its neighbour's copies, which its own readers have
  // waited for, and not its neighbour's readers, who tell when they have read a stage.
  __device__ __forceinline__ void wait_all_read() {
    for (int i = 0; i < Shape::kStages; ++i) {
      wait_barrier(ring_.empty + 8 * stage_, phase_);
      advance();
    }
  }

  // A step of its own: boxes of 64 columns from `column` on, each of all the tile's rows.
  __device__ __forceinline__ void copy_boxes(const CUtensorMap& map, int boxes, int row, int column) {
    wait_barrier(ring_.empty + 8 * stage_, phase_);
    arrive_expecting(ring_.full + 8 * stage_, boxes * Shape::kRows * 128);
    for (int box = 0; box < boxes; ++box)
      load_box(&map, place() + box * Shape::kRows * 128, ring_.full + 8 * stage_, column + box * 64, row);
    advance();
  }

 private:
  __device__ __forceinline__ uint32_t place() const { return ring_.base + stage_ * Shape::kStageBytes; }
  __device__ __forceinline__ void advance() {
    if (++stage_ == Shape::kStages) stage_ = 0, phase_ ^= 1;
  }
  __device__ __forceinline__ void load_w(uint32_t stage, int step, int column, int columns) const {
    const int share = tiles_.rank * (columns / kCluster);
    arrive_expecting(ring_.full + 8 * stage, Shape::kXBytes + columns * 128);
    load_box_for(uint16_t((1 << kCluster) - 1), columns == Shape::kColumns ? &w_map_ : &narrow_w_map_,
                 ring_.base + stage * Shape::kStageBytes + Shape::kXBytes + share * 128, ring_.full + 8 * stage,
                 step * kDepth, column + share);
  }

  const Ring& ring_;
  const AllTiles& tiles_;
  const CUtensorMap& x_map_;
  const CUtensorMap& w_map_;
  const CUtensorMap& narrow_w_map_;
  int steps_;
  int early_;                       // stages that have their W already
  uint32_t stage_ = 0, phase_ = 1;  // the first pass over the ring finds every stage empty
};

}  // namespace embert::hopper
