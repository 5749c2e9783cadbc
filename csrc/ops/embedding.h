// From a batch's ids to the first rows: prefix sums, attention's work lists, and the embedding. `T` rows are tokens,
// end to end; `H` is the hidden size. Each launcher checks its arguments, launches on a stream and returns immediately.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/launch.h"
#include "common/types.h"
#include "ops/attention_work.h"
#include "ops/norm.h"

namespace embert {

// --- offsets.cu: from the lengths of a batch to the layout that every later kernel reads -----------------------------
struct OffsetsInput {
  const int* header;     // [2] {sequences B, tokens T}
  const int* lengths;    // [B]
  const int* ids;        // [T]
  const int* types;      // [T] or null: all 0
  const uint32_t* cuts;  // [B]
};
struct OffsetsOutput {
  int* ids;               // [token_capacity], 0 past T
  int* types;             // [token_capacity], 0 past T
  int* positions;         // [token_capacity], counted from each sequence's start; 0 past T
  uint32_t* cuts;         // [sequence_capacity]
  int* cu_seqlens;        // [sequence_capacity + 1], T past B
  AttentionTile* tiles;   // [tile_capacity], of sequences longer than kAttentionShort; empty past the last
  AttentionTile* shorts;  // [short_capacity], the other sequences; empty past the last
};
struct OffsetsCapacity {
  int tokens, sequences, tiles, shorts;
};
Status compute_offsets(const OffsetsInput& in, const OffsetsOutput& out, const OffsetsCapacity& capacity,
                       const Stream& stream);

// --- embedding.cu: y[T, H] = LayerNorm(word[ids] + position[positions] + type[types]) --------------------------------
// With `sums` (norm.h; one part a group) y is not normalized.
struct EmbeddingTables {
  const void* word;      // [vocabulary, H]
  const void* position;  // [positions, H]
  const void* type;      // [types, H] or null
  Norm norm;
  bool prescaled_rows = false;  // multiply rows that are not normalized by norm.gamma
};
Status embed(DType dtype, const EmbeddingTables& tables, const int* ids, const int* types, const int* positions,
             int rows, int hidden, float epsilon, void* y, float2* sums, const Stream& stream);

// --- embedding.cu: y[T, H] = scale · word[ids], where no norm follows; scale is rounded to dtype ---------------------
// Rows of y are stored multiplied by `after`, unless that is null. y_stats: null, or the destination of y's row
// statistics before rounding and factors, one part a group.
Status embed_words(DType dtype, const void* word, const int* ids, int rows, int hidden, float scale, void* y,
                   const float* after, float2* y_stats, const Stream& stream);

// --- embedding.cu: x[T, H] = LayerNorm(x) + type[types], the first rows of layers after an encoder -------------------
// norm: none where x is normalized. sums: null, or the destination of x's row statistics, one part a group.
Status add_types(DType dtype, const Norm& norm, float epsilon, const void* type, const int* types, int rows, int hidden,
                 void* x, float2* sums, const Stream& stream);

}  // namespace embert
