// The launchers of all kernels. Each takes device pointers, checks what the host can check, launches on a stream and
// returns at once. `T` rows are tokens, end to end; `H` is the hidden size; storage type is `dtype` unless named.
#pragma once

#include <string>

#include "../launch.h"
#include "norm.h"
#include "shapes.h"

namespace embert {

class TensorMaps;

// --- offsets.cu ---------------------------------------------------------------------------------------------------
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
  AttentionTile* tiles;   // [tile_capacity], of sequences longer than kAttentionShort; empty past their number
  AttentionTile* shorts;  // [short_capacity], the other sequences; empty past their number
};
struct OffsetsCapacity {
  int tokens, sequences, tiles, shorts;
};
Status compute_offsets(const OffsetsInput& in, const OffsetsOutput& out, const OffsetsCapacity& capacity,
                       const Stream& stream);

// --- embedding.cu: y[T, H] = LayerNorm(word[ids] + position[positions] + type[types]) ------------------------------
// With `sums` (norm.h: one part a group) y is not normalised.
struct EmbeddingTables {
  const void* word;      // [vocabulary, H]
  const void* position;  // [positions, H]
  const void* type;      // [types, H] or null
  Norm norm;
  bool gamma_in_rows = false;  // rows that are not normalised are multiplied with norm.gamma
};
Status embed(DType dtype, const EmbeddingTables& tables, const int* ids, const int* types, const int* positions,
             int rows, int hidden, float epsilon, void* y, float2* sums, const Stream& stream);

// --- embedding_small.cu: offsets.cu and embedding.cu in one launch, for a batch in the host's memory (sm_90) ---------
// in.header: the first of `bytes` that hold all of `in`, types included. Of `out`, ids, types and positions are not
// written.
constexpr int kSmallRows = 128;  // capacity.tokens, at most
Status embed_small(DType dtype, const EmbeddingTables& tables, const OffsetsInput& in, size_t bytes,
                   const OffsetsOutput& out, const OffsetsCapacity& capacity, int hidden, void* y, float2* sums,
                   const Stream& stream);

// --- layernorm.cu: y[T, H] = LayerNorm(x); y may be x ----------------------------------------------------------------
Status layernorm(DType dtype, const void* x, const Norm& norm, int rows, int hidden, float epsilon, void* y,
                 const Stream& stream);
bool layernorm_takes(DType dtype, int hidden);

// --- activate.cu: x[T, N] = activation(x), in place ------------------------------------------------------------------
Status activate_rows(DType dtype, Activation activation, int rows, int columns, void* x, const Stream& stream);

// --- attention*.cu: context[T, heads·d] = softmax((Q·Kᵀ + relative)/√d)·V within each sequence; qkv is [T, 3·heads·d]
struct AttentionWork {
  const AttentionTile* tiles;
  int tile_count;
  const AttentionTile* shorts;
  int short_count;
  Queries queries = Queries::kAll;  // of each sequence, whose context is wanted; the rest of it may be left unwritten
};
constexpr int kMostAttentionTiles = 65535;  // gridDim.y, where each has a block a head
inline Status check_attention_work(int tiles, int shorts) {
  if (int64_t(tiles) + (shorts + 1) / 2 <= kMostAttentionTiles && shorts <= kMostAttentionTiles) return {};
  return Status::refused("attention: " + std::to_string(tiles) + " tiles of " + std::to_string(kAttentionRows) +
                         " queries and " + std::to_string(shorts) + " texts of up to " +
                         std::to_string(kAttentionShort) + " tokens are over " + std::to_string(kMostAttentionTiles) +
                         " in a batch");
}
// maps: of a Hopper device, or null. All forwards of an encoder must agree on it: bits depend on it.
Status attention(DType dtype, const void* qkv, int rows, const AttentionWork& work, int heads, int head_size,
                 const RelativeScores& relative, void* context, TensorMaps* maps, const Stream& stream);
bool attention_takes(DType dtype, int head_size);

// --- gather.cu: each sequence's row that `pooling` (cls or last token) reads, of context and of x with its sums
// ------- to: [B, H] each; sums_to like x's sums, of B rows.
Status gather(DType dtype, const void* context, const Rows& x, const int* cu_seqlens, Pooling pooling, int sequences,
              int hidden, void* context_to, void* x_to, float2* sums_to, const Stream& stream);

// --- pool.cu: one FP32 vector a sequence, cut to its dimensions and (where asked) of length 1 -----------------------
// rows: [T, H], or `gathered` [B, H]; where they have sums, `norm` is applied. longest: no sequence has more rows; it
// decides how many blocks share one, no bits.
Status pool(DType dtype, Pooling pooling, const Rows& rows, bool gathered, const Norm& norm, float epsilon,
            const int* cu_seqlens, const uint32_t* cuts, int sequences, int longest, int hidden, float* vectors,
            const Stream& stream);

// --- row_offsets.cu: raises `largest` (device memory, ≥ 0) to the largest |mean| / deviation of rows with sums
Status row_offsets(const Rows& rows, int count, int width, float epsilon, float* largest, const Stream& stream);

// --- build.cu: which of this build's machine code the device runs
struct Build {
  int architecture = 0;  // 800, 900 …: what it was compiled for
  bool hopper = false;   // with Hopper's own instructions (90a)
};
Status read_build(Build& build, const Stream& stream);

// --- convert.cu: y[n] = x[n] between storage types
// --------------------------------------------------------------------
Status convert(DType from, const void* x, DType to, void* y, size_t count, const Stream& stream);

}  // namespace embert
