// A batch as the caller passes it, and as the device reads it: header, lengths, cuts, ids and types in one buffer; and
// the limits of batches, which follow from the kernels' grids.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "common/status.h"
#include "encoder/encoder_config.h"
#include "heads/tasks.h"
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

// The documents that a batch scores with queries, as the task CLASSIFY of a model of late interaction.
struct ScoredDocuments {
  int documents = 0, vectors = 0;
  // [documents, 4] or null: no sequence is scored. A row has the first index in `rows` and the number of the vectors of
  // the document's query, then the first index and the number of the document's vectors.
  const int32_t* spans = nullptr;
  const int32_t* rows = nullptr;  // [vectors]: tokens that have a vector

  // Numbers whose sum is a score (heads/heads.h), of the document with the most.
  int parts() const {
    int most = 1;
    for (int i = 0; i < documents; ++i) most = std::max(most, (spans[4 * i + 1] + kScoreVectors - 1) / kScoreVectors);
    return most;
  }
};

// A packed batch on the host, as the caller passes it. `submit` reads it before it returns.
struct BatchView {
  int tokens = 0, sequences = 0;
  const int32_t* ids = nullptr;         // [T]
  const int32_t* cu_seqlens = nullptr;  // [B + 1]
  const int32_t* types = nullptr;       // [T] or null: all 0
  // [T] or null: counted from each sequence's start. Used where sequences contain padding tokens: rows of the position
  // table.
  const int32_t* positions = nullptr;
  const Tasks* tasks = nullptr;         // [B], 0 only where documents are scored, or null: all EMBED
  const int32_t* dimensions = nullptr;  // [B], 0 to width (0: all of them), or null: all of them
  const uint8_t* normalize = nullptr;   // [B] or null: all of them
  // [B, 2] or null: no sequence has one. The text before a sequence's own tokens: the sequence that begins with it, and
  // its tokens, 0 for none.
  const int32_t* prefixes = nullptr;
  // [B] or null: all. The number of a sequence's first own tokens that its tokens attend to; the others are queries
  // only.
  const int32_t* attended = nullptr;
  ScoredDocuments scored;

  int own_tokens(int sequence) const { return cu_seqlens[sequence + 1] - cu_seqlens[sequence]; }
  int attended_tokens(int sequence) const { return attended == nullptr ? own_tokens(sequence) : attended[sequence]; }
  int prefix_tokens(int sequence) const { return prefixes == nullptr ? 0 : prefixes[2 * sequence + 1]; }
};

// Layout of that buffer.
struct InputLayout {
  int tokens, sequences;
  size_t lengths, cuts, ids, types, bytes;  // offsets in bytes
  InputLayout(int tokens, int sequences);
};

// Returns an error if the batch exceeds these limits, is inconsistent, or has ids outside of the vocabulary.
Status check_batch(const BatchView& batch, const EncoderConfig& model, int max_tokens, int max_sequences);
void write_batch(const BatchView& batch, const InputLayout& layout, uint8_t* to);

// Attention's work lists, which the host writes for batches with prefixes or with tokens that are not attended to:
// tiles, shorts, and the tiles' prefixes.
struct WorkLayout {
  size_t shorts, prefixes, bytes;  // offsets in bytes
  WorkLayout(int tile_count, int short_count);
};
void write_work(const BatchView& batch, const WorkLayout& layout, uint8_t* to);
// Positions in the whole texts: [T].
void write_prefix_positions(const BatchView& batch, int* to);

}  // namespace embert
