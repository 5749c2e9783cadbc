// How clusters of blocks share the work of a layer's tail (hopper_tail.cuh), to a chunk of a tile.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace embert {

// Chunks `from` to `to` of a tile, which may be begun or finished elsewhere.
struct FeedForwardRun {
  int tile, from, to;
};

// A cluster's part, counted through all tiles: at least as much as a tile, so that a run which begins inside a tile
// ends with it. Before its first chunk a tile has attention's output product, which counts as kBefore chunks, and after
// its last one what becomes of the accumulators, which counts as kAfter.
struct FeedForwardRange {
  static constexpr int kBefore = 4, kAfter = 2;

  int chunks;            // of a tile
  int tile, from;        // where it begins: with a tile, or with a later chunk of one
  int end_tile, end_to;  // and ends: before a tile, or before a later chunk of one

  // Of no more clusters than tiles.
  static __host__ __device__ inline FeedForwardRange of(int tiles, int chunks, int cluster, int clusters) {
    const int64_t all = int64_t(tiles) * (kBefore + chunks + kAfter);
    FeedForwardRange range{chunks, 0, 0, 0, 0};
    place(int(all * cluster / clusters), chunks, range.tile, range.from);
    place(int(all * (cluster + 1) / clusters), chunks, range.end_tile, range.end_to);
    return range;
  }

  // First the begin of the last tile, if that is not finished here; last the end of the first, if that was begun
  // by the cluster before. So whoever waits for another waits for what that one did first, and comes after it; and
  // a cluster's first run begins a tile.
  __host__ __device__ inline int runs() const { return end_tile - tile + (end_to != 0); }
  __host__ __device__ inline FeedForwardRun run(int i) const {
    if (end_to != 0 && i-- == 0) return {end_tile, 0, end_to};
    const int at = tile + (from != 0) + i;
    if (at < end_tile) return {at, 0, chunks};
    return {tile, from, chunks};
  }

 private:
  // Where a share may begin that would begin at `at`: with a tile, or with one of its chunks that is not the first.
  static __host__ __device__ inline void place(int at, int chunks, int& tile, int& chunk) {
    const int whole = kBefore + chunks + kAfter;
    tile = at / whole;
    const int in_tile = at % whole;
    chunk = in_tile > kBefore ? in_tile - kBefore : 2 * in_tile > kBefore ? 1 : 0;
    if (chunk >= chunks) ++tile, chunk = 0;
  }
};

}  // namespace embert
