#include "encoder/batch.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace embert {
namespace {

size_t aligned(size_t bytes) {
  return (bytes + 15) / 16 * 16;
}

Status check_attended(const BatchView& batch) {
  for (int i = 0; batch.attended != nullptr && i < batch.sequences; ++i) {
    if (batch.attended[i] < 1 || batch.attended[i] > batch.own_tokens(i))
      return Status::refused("attended tokens of sequence ", i, " must be 1 to ", batch.own_tokens(i), ", found ",
                             batch.attended[i]);
  }
  return {};
}

Status check_prefixes(const BatchView& batch, const EncoderConfig& model) {
  if (batch.prefixes == nullptr) return {};
  if (!model.shares_prefixes() || batch.positions != nullptr)
    return Status::refused("sequences of this model cannot continue others");
  for (int i = 0; i < batch.sequences; ++i) {
    const int owner = batch.prefixes[2 * i], tokens = batch.prefixes[2 * i + 1];
    if (tokens == 0) continue;
    const bool exists = tokens > 0 && owner >= 0 && owner < batch.sequences && batch.prefix_tokens(owner) == 0 &&
                        tokens <= batch.attended_tokens(owner);
    if (!exists || tokens % kPrefixStep != 0 || tokens + batch.own_tokens(i) <= kAttentionShort)
      return Status::refused("sequence ", i, " cannot continue ", tokens, " tokens of sequence ", owner,
                             ": they must exist, be a multiple of ", kPrefixStep, ", and texts have over ",
                             kAttentionShort);
  }
  return {};
}

Status check_scored(const BatchView& batch, const EncoderConfig& model) {
  const ScoredDocuments& scored = batch.scored;
  if (scored.spans == nullptr) return {};
  if (!model.task_heads.scores()) return Status::refused("this model does not score documents");
  int documents = 0;
  for (int i = 0; batch.tasks != nullptr && i < batch.sequences; ++i)
    documents += (batch.tasks[i] & bit(Task::kClassify)) != 0 ? 1 : 0;
  if (documents != scored.documents)
    return Status::refused("scores of ", scored.documents, " documents; ", documents, " sequences request CLASSIFY");
  for (int i = 0; i < 2 * documents; ++i) {
    const int64_t first = scored.spans[2 * i], count = scored.spans[2 * i + 1];
    if (first < 0 || count < 0 || first + count > scored.vectors)
      return Status::refused("document ", i / 2, " is scored with the vectors ", first, " to ", first + count, " of ",
                             scored.vectors);
  }
  for (int i = 0; i < scored.vectors; ++i) {
    if (scored.rows[i] < 0 || scored.rows[i] >= batch.tokens)
      return Status::refused("a vector of token ", scored.rows[i], " in a batch of ", batch.tokens, " tokens");
  }
  return {};
}

}  // namespace

InputLayout::InputLayout(int tokens, int sequences) : tokens(tokens), sequences(sequences) {
  lengths = 16;  // after the header {sequences, tokens}
  cuts = lengths + aligned(4 * size_t(sequences));
  ids = cuts + aligned(4 * size_t(sequences));
  types = ids + aligned(4 * size_t(tokens));
  bytes = types + aligned(4 * size_t(tokens));
}

Status check_batch(const BatchView& batch, const EncoderConfig& model, int max_tokens, int max_sequences) {
  if (batch.tokens < 0 || batch.sequences < 0) return Status::refused("a batch of fewer than no tokens or sequences");
  if (batch.tokens > max_tokens || batch.sequences > max_sequences) {
    return Status::refused("a batch of ", batch.tokens, " tokens in ", batch.sequences, " sequences; at most ",
                           max_tokens, " tokens in ", max_sequences, " sequences can be run");
  }
  if (batch.cu_seqlens[0] != 0 || batch.cu_seqlens[batch.sequences] != batch.tokens) {
    return Status::refused("cu_seqlens must run from 0 to the number of ids");
  }
  for (int i = 0; i < batch.sequences; ++i) {
    int64_t length = int64_t(batch.cu_seqlens[i + 1]) - batch.cu_seqlens[i];
    if (length >= 1) length += std::max(batch.prefix_tokens(i), 0);
    if (length < 1 || length > model.max_length()) {
      return Status::refused("sequence ", i, " has ", length, " tokens; 1 to ", model.max_length(), " can be run");
    }
  }
  EMBERT_TRY(check_attended(batch));
  EMBERT_TRY(check_prefixes(batch, model));
  EMBERT_TRY(check_scored(batch, model));
  const auto in_range = [&](const int32_t* values, int limit) {
    uint32_t highest = 0;  // a negative value becomes a very large one
    for (int i = 0; i < batch.tokens; ++i) highest = std::max(highest, uint32_t(values[i]));
    return highest < uint32_t(limit);
  };
  if (!in_range(batch.ids, model.vocabulary)) {
    return Status::refused("a token id is outside the vocabulary of ", model.vocabulary);
  }
  const int types = std::max(model.types, model.task_heads.text_types);
  if (batch.types != nullptr && !in_range(batch.types, std::max(types, 1))) {
    return Status::refused("a token type is outside the model's ", types);
  }
  if (batch.positions != nullptr && !in_range(batch.positions, model.position_rows())) {
    return Status::refused("a position is outside the model's table of ", model.position_rows());
  }
  const bool scores = batch.scored.spans != nullptr;
  const Tasks supported = model.task_heads.tasks() | (scores ? bit(Task::kClassify) : 0);
  for (int i = 0; batch.tasks != nullptr && i < batch.sequences; ++i) {
    if ((batch.tasks[i] == 0 && !scores) || (batch.tasks[i] & ~supported) != 0) {
      return Status::refused("tasks of sequence ", i, " must be bits of ", supported, " (", names_of(supported),
                             "), and not 0, found ", batch.tasks[i]);
    }
  }
  for (int i = 0; batch.dimensions != nullptr && i < batch.sequences; ++i) {
    if (batch.dimensions[i] < 0 || batch.dimensions[i] > model.width()) {
      return Status::refused("dimensions of sequence ", i, " must be 0 to ", model.width(), ", found ",
                             batch.dimensions[i]);
    }
  }
  return {};
}

void write_batch(const BatchView& batch, const InputLayout& layout, uint8_t* to) {
  int* const header = reinterpret_cast<int*>(to);
  header[0] = batch.sequences;
  header[1] = batch.tokens;
  int* const lengths = reinterpret_cast<int*>(to + layout.lengths);
  auto* const cuts = reinterpret_cast<uint32_t*>(to + layout.cuts);
  for (int i = 0; i < batch.sequences; ++i) {
    lengths[i] = batch.cu_seqlens[i + 1] - batch.cu_seqlens[i];
    const uint32_t kept = batch.dimensions == nullptr ? 0 : uint32_t(batch.dimensions[i]);
    cuts[i] = kept | (batch.normalize != nullptr && batch.normalize[i] == 0 ? kCutKeepsLength : 0);
  }
  std::memcpy(to + layout.ids, batch.ids, 4 * size_t(batch.tokens));
  if (batch.types != nullptr) {
    std::memcpy(to + layout.types, batch.types, 4 * size_t(batch.tokens));
  } else {
    std::memset(to + layout.types, 0, 4 * size_t(batch.tokens));
  }
}

WorkLayout::WorkLayout(int tile_count, int short_count) {
  shorts = size_t(tile_count) * sizeof(AttentionTile);
  prefixes = shorts + size_t(short_count) * sizeof(AttentionTile);
  bytes = prefixes + size_t(tile_count) * sizeof(TilePrefix);
}

void write_work(const BatchView& batch, const WorkLayout& layout, uint8_t* to) {
  auto* tile = reinterpret_cast<AttentionTile*>(to);
  auto* short_text = reinterpret_cast<AttentionTile*>(to + layout.shorts);
  auto* prefix = reinterpret_cast<TilePrefix*>(to + layout.prefixes);
  for (int i = 0; i < batch.sequences; ++i) {
    const int shared = batch.prefix_tokens(i), tokens = shared + batch.own_tokens(i), row = batch.cu_seqlens[i];
    const int length = shared + batch.attended_tokens(i), hidden = tokens - length;
    if (tokens <= kAttentionShort) {
      *short_text++ = {row, length, 0, hidden};
      continue;
    }
    for (int query = shared; query < tokens; query += kAttentionRows) {
      *tile++ = {row - shared, length, query, hidden};
      *prefix++ = shared == 0 ? TilePrefix{} : TilePrefix{batch.cu_seqlens[batch.prefixes[2 * i]], shared};
    }
  }
}

void write_prefix_positions(const BatchView& batch, int* to) {
  for (int i = 0; i < batch.sequences; ++i) {
    int* const first = to + batch.cu_seqlens[i];
    std::iota(first, first + batch.own_tokens(i), batch.prefix_tokens(i));
  }
}

}  // namespace embert
