// The words that kernels, encoder and bindings share.
#pragma once

#include <cstdint>

namespace embert {

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
inline int bytes_of(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : 2;
}

enum class Activation : int { kNone = 0, kGeluErf = 1, kGeluTanh = 2, kRelu = 3 };

enum class Pooling : int { kCls = 0, kMean = 1, kMax = 2, kLast = 3 };

// One piece of attention work: up to kAttentionRows query rows of one sequence, all its keys.
struct AttentionTile {
  int first_row;  // of the sequence, in the packed batch
  int length;     // of the sequence; 0: no work
  int query;      // first query row of this tile, counted from the sequence's start
  int reserved;
};

// Whose context is wanted: every query's, or only each sequence's first or last one's.
enum class Queries : int { kAll = 0, kFirst = 1, kLast = 2 };

// What attention adds to Q·Kᵀ, before it scales, by how far the key is from the query; the same in every layer.
struct RelativeScores {
  const float* scores = nullptr;  // [heads, 2·reach], of key - query + reach; null: nothing is added
  int reach = 0;  // ≥ the longest sequence, a multiple of kAttentionRows: masked scores have a place too
};

constexpr int kAttentionRows = 64;   // query rows of a tile: 4 warps of 16
constexpr int kAttentionShort = 32;  // sequences up to this many tokens take one warp a head instead of tiles

// The sequences' cuts: low bits the number of dimensions kept (0 = all), this bit: do not normalise.
constexpr uint32_t kCutKeepsLength = 1u << 31;

}  // namespace embert
