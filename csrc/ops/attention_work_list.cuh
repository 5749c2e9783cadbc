// Reads attention's work list in kernels.
#pragma once

#include "ops/attention_work.h"

namespace embert {

// Whether a tile of `rows` queries holds one whose context is needed.
__device__ __forceinline__ bool is_needed(const AttentionTile& tile, Queries queries, int rows) {
  if (queries == Queries::kFirst) return tile.query == 0;
  return queries == Queries::kAll || tile.query + rows >= tile.length;
}

// An entry of the work list, read before griddepcontrol_wait, which saves a fifth of a microsecond. This is safe:
// where offsets.cu writes the list, embedding.cu lets its dependents start only when offsets.cu has ended, and
// attention comes after both. embedding_small.cu lets its dependents start when it has written the list. The load
// bypasses the L1 cache, which may hold the list of the previous batch.
__device__ __forceinline__ AttentionTile early_tile(const AttentionTile* tile) {
  const int4 words = __ldcg(reinterpret_cast<const int4*>(tile));
  return {words.x, words.y, words.z, words.w};
}

}  // namespace embert
