// Attention's work: tiles of queries, which queries are needed, and relative position scores.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/status.h"

namespace embert {

constexpr int kAttentionRows = 64;   // query rows of a tile: 4 warps of 16
constexpr int kAttentionShort = 32;  // sequences of up to this many tokens take two warps a head instead of tiles

// One entry of the work list: up to kAttentionRows query rows of one sequence, and all its keys.
struct AttentionTile {
  int first_row;  // of the sequence, in the packed batch
  int length;     // tokens of the sequence that are attended to, its first ones; 0: no work
  int query;      // first query row of this tile, counted from the sequence's start
  int hidden;     // tokens after these, which no query attends to

  __host__ __device__ inline int tokens() const { return length + hidden; }
};

// The queries whose context is needed: all, or only the first or the last of each sequence.
enum class Queries : int { kAll = 0, kFirst = 1, kLast = 2 };

// Scores by key − query, which attention adds to Q·Kᵀ before it scales; the same in every layer.
struct RelativeScores {
  const float* scores = nullptr;  // [heads, 2·reach], of key - query + reach; null: nothing is added
  int reach = 0;  // ≥ the longest sequence, a multiple of kAttentionRows: masked scores have an entry too
};

// The first rows of another sequence, which a tile's text begins with: the rows of its positions 0 … tokens − 1. The
// tile's first row is then where position 0 would be if all rows of the text were in one place, and may be negative.
struct TilePrefix {
  int row;     // of the batch
  int tokens;  // a multiple of kPrefixStep; 0: none
};
constexpr int kPrefixStep = 8;  // rows of a box of TMA that is one swizzle atom

struct AttentionWork {
  const AttentionTile* tiles;
  int tile_count;
  const AttentionTile* shorts;
  int short_count;
  Queries queries = Queries::kAll;  // the context of the others may stay unwritten
};
// The same for a layer that may have a window. It is a separate type because kernels without a window take only
// AttentionWork: one more member changes their machine code, even in padding (sm90.cu with RelativeScores).
struct WindowedWork : AttentionWork {
  // A query attends to this many keys on each side of itself; 0: all of its text. Never with RelativeScores.
  int window = 0;
  const TilePrefix* prefixes = nullptr;  // of each tile; null: none has a prefix. Short texts have none
  WindowedWork(const AttentionWork& work, int window = 0) : AttentionWork(work), window(window) {}
};
constexpr int kMaxAttentionTiles = 65535;  // gridDim.y: a tile has one block per head
inline Status check_attention_work(int tiles, int shorts) {
  if (int64_t(tiles) + (shorts + 1) / 2 <= kMaxAttentionTiles && shorts <= kMaxAttentionTiles) return {};
  return Status::refused("attention: ", tiles, " tiles of ", kAttentionRows, " queries and ", shorts,
                         " texts of up to ", kAttentionShort, " tokens are over ", kMaxAttentionTiles, " in a batch");
}

#if defined(__CUDACC__)

// True if the context of one of a tile's `rows` queries is needed.
__device__ __forceinline__ bool is_needed(const AttentionTile& tile, Queries queries, int rows) {
  if (queries == Queries::kFirst) return tile.query == 0;
  return queries == Queries::kAll || tile.query + rows >= tile.tokens();
}

// An entry of the work list, read before griddepcontrol_wait, which saves a fifth of a microsecond. This is safe:
// where offsets.cu writes the list, embedding.cu lets its dependents start only when offsets.cu has ended, and
// attention comes after both. The load bypasses the L1 cache, which may hold the list of the previous batch.
__device__ __forceinline__ AttentionTile early_tile(const AttentionTile* tile) {
  const int4 words = __ldcg(reinterpret_cast<const int4*>(tile));
  return {words.x, words.y, words.z, words.w};
}

// Prefixes of a kernel's tiles, and their absence.
struct NoPrefixes {
  __device__ __forceinline__ TilePrefix operator[](unsigned) const { return {0, 0}; }
};
struct SharedPrefixes {
  const TilePrefix* tiles;
  __device__ __forceinline__ TilePrefix operator[](unsigned index) const {
    const int2 words = __ldcg(reinterpret_cast<const int2*>(tiles + index));
    return {words.x, words.y};
  }
};

#endif

}  // namespace embert
