// Buckets of small batches, and limits that follow from the kernels' grids.
#pragma once

#include <algorithm>
#include <iterator>

#include "ops/attention_work.h"

namespace embert {

// Batches of up to the last of these numbers of tokens and sequences run as captured graphs, rounded up to the next
// one.
constexpr int kTokenBuckets[] = {16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024};
constexpr int kSequenceBuckets[] = {1, 8, 32, 64};

// Up to this many sequences the pooling kernel writes its vectors to host memory directly, which saves the launch of a
// copy.
constexpr int kDirectSequences = 64;
static_assert(kSequenceBuckets[std::size(kSequenceBuckets) - 1] <= kDirectSequences, "graphs write directly");

// The most attention tiles for any lengths: a tile has 64 tokens, or over 32.
inline int max_tiles(int tokens, int sequences) {
  return std::min(tokens / kAttentionRows + std::min(sequences, tokens / (kAttentionShort + 1)), tokens);
}

// A batch of this many tokens can be launched even if it is a single text, which consists only of tiles.
constexpr int kMaxTokens = kMaxAttentionTiles * kAttentionRows;

}  // namespace embert
