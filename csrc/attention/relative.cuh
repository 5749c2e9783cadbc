// Relative position scores (MPNet's), as initial values of the scores.
#pragma once

#include "ops/attention_work.h"

namespace embert {

// Initializes the scores of a warp's 16 rows and 8 · kTiles keys. Q·Kᵀ is added to them, so the addition is free, and
// the maximum includes it. `from` is the position of the lane's first row and column. `at` gives element i of tile n,
// in mma.cuh's order.
//
// A score depends only on key − query. So rows g + 8 of a tile need what rows g had of the previous tile, and a step of
// 64 keys takes 18 loads and 14 moves a lane. The lanes of a load read 14 adjacent floats, one wavefront of the L1
// cache (docs/experiments.md has the alternatives).
//
// The loads are plain ones: the compiler moves loads through __ldg behind the next barrier, just before their use.
template <int kTiles, typename At>
__device__ __forceinline__ void init_scores(const float* from, const At& at) {
  float before[2] = {from[-8], from[-7]};
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      at(n, i + 2) = before[i];
      at(n, i) = before[i] = from[n * 8 + i];
    }
}
// The lane's `from` for rows from `query` on and key 0.
__device__ __forceinline__ const float* first_score(const RelativeScores& relative, int head, int query, int lane) {
  return relative.scores + (2 * head + 1) * relative.reach - query + 2 * (lane % 4) - lane / 4;
}

}  // namespace embert
