// The division of the feed-forward kernel's work (feed_forward.cuh) among clusters, in units of a tile's chunk.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace embert {

// Chunks `from` to `to` of a tile. Other clusters may do the rest.
struct FeedForwardRun {
  int tile, from, to;
};

// A cluster's part: chunks, counted over all tiles. It has at least as many chunks as a tile, so that a run which
// begins inside a tile also ends it.
struct FeedForwardRange {
  int chunks, begin, end;

  // There are at most as many clusters as tiles.
  static __host__ __device__ inline FeedForwardRange of(int tiles, int chunks, int cluster, int clusters) {
    const int64_t all = int64_t(tiles) * chunks;
    return {chunks, int(all * cluster / clusters), int(all * (cluster + 1) / clusters)};
  }

  // The first run is the start of the last tile, if another cluster ends that tile. The last run is the end of the
  // first tile, if the previous cluster began it. So a cluster waits only for what an earlier cluster does first.
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
