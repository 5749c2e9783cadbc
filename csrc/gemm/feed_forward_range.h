// How clusters of blocks share the feed-forward layer's work (hopper_feed_forward.cuh), to a chunk of a tile.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace embert {

// Chunks `from` to `to` of a tile, which may be begun or finished elsewhere.
struct FeedForwardRun {
  int tile, from, to;
};

// A cluster's part: chunks, counted through all tiles; at least as many as a tile has, so that a run which begins
// inside a tile ends with it.
struct FeedForwardRange {
  int chunks, begin, end;

  // Of no more clusters than tiles.
  static __host__ __device__ inline FeedForwardRange of(int tiles, int chunks, int cluster, int clusters) {
    const int64_t all = int64_t(tiles) * chunks;
    return {chunks, int(all * cluster / clusters), int(all * (cluster + 1) / clusters)};
  }

  // First the begin of the last tile, if that is not finished here; last the end of the first, if that was begun
  // by the cluster before. So whoever waits for another waits for what that one did first, and comes after it.
  __host__ __device__ inline int runs() const {
    return (begin % chunks != 0) + (end / chunks - (begin + chunks - 1) / chunks) + (end % chunks != 0);
  }
  __host__ __device__ inline FeedForwardRun run(int i) const {
    if (end % chunks != 0 && i-- == 0) return {end / chunks, 0, end % chunks};
    const int tile = (begin + chunks - 1) / chunks + i;
    if (tile < end / chunks) return {tile, 0, chunks};
    return {begin / chunks, begin % chunks, chunks};
  }
};

}  // namespace embert
