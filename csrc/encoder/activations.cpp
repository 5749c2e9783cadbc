#include "encoder/activations.h"

#include <algorithm>
#include <iterator>

#include "encoder/batch.h"

namespace embert {

Status Activations::allocate(const EncoderConfig& model, const Program& program, int max_tokens, bool folds,
                             const Stream& stream) {
  rows_ = std::max((max_tokens + 127) / 128 * 128, kTokenBuckets[std::size(kTokenBuckets) - 1]);
  sequences_ = std::min(rows_, 65535);
  const TaskHeads& heads = model.task_heads;
  const size_t element = bytes_of(model.dtype), hidden = model.hidden, rows = rows_;
  const size_t column = rows * element, columns = std::max(program.widest, heads.multi_scratch_columns());
  head_floats_ = size_t(sequences_) * heads.widest(model.hidden);
  multi_bytes_ = rows * heads.multi_scratch_columns() / 2 * element;
  // Of experts: rows of kInner and of kExperts.
  routed_.kind = {model.experts, model.top_k};
  const size_t tiles = model.expert_layers.empty() ? 0 : max_expert_tiles(routed_.kind, rows);
  const size_t outputs = program.groups_experts ? tiles * kExpertTile : rows * model.experts;
  const size_t inner_bytes = (program.groups_experts ? outputs : rows) * model.inner * element;
  const size_t expert_bytes = tiles == 0 ? 0 : inner_bytes + outputs * hidden * element;
  for (int pass = 0; pass < 2; ++pass) {
    Arena arena(arena_.as());
    x_ = arena.take(hidden * column);
    sum_ = arena.take(hidden * column);
    if (model.layer_inputs > 0) embedded_ = arena.take(hidden * column);
    shared_ = arena.take(std::max({columns * column, 2 * head_floats_ * sizeof(float), expert_bytes}));
    if (folds) {
      x_stats_ = arena.take<float2>(stats_count(rows_, model.hidden));
      sum_stats_ = arena.take<float2>(stats_count(rows_, model.hidden));
    }
    if (model.int8) {
      quantized_.data = arena.take<int8_t>(rows * std::max(hidden, size_t(model.inner)));
      quantized_.scales = arena.take<float>(rows);
    }
    if (tiles > 0) {
      routed_.routes = arena.take<Route>(rows * model.top_k);
      routed_.slots = arena.take<int>(rows * model.top_k);
      routed_.counts = arena.take<int>((rows + kRoutedRows - 1) / kRoutedRows * model.experts);
      routed_.tiles = arena.take<int>(1 + tiles);
    }
    if (!model.position_table) zeros_ = arena.take<int>(rows);
    offsets_.ids = arena.take<int>(rows);
    offsets_.types = arena.take<int>(rows);
    offsets_.positions = arena.take<int>(rows);
    offsets_.cuts = arena.take<uint32_t>(sequences_);
    offsets_.cu_seqlens = arena.take<int>(size_t(sequences_) + 1);
    offsets_.tiles = arena.take<AttentionTile>(max_tiles(rows_, sequences_));
    offsets_.shorts = arena.take<AttentionTile>(sequences_);
    if (pass == 0) EMBERT_TRY(arena_.allocate(arena.used()));
  }
  context_ = shared_ + program.context_from * column;
  inner_ = shared_ + program.inner_from * column;
  gated_ = shared_ + model.layer_inputs * column;
  experts_ = shared_ + inner_bytes;
  // Batches that are rounded up compute rows that nothing reads. Zeros keep them finite.
  EMBERT_CUDA(cudaMemsetAsync(arena_.as(), 0, arena_.bytes(), stream.handle));
  return {};
}

uint8_t* Activations::rows(Buffer buffer) const {
  switch (buffer) {
    case Buffer::kX:
      return x_;
    case Buffer::kSum:
      return sum_;
    case Buffer::kContext:
      return context_;
    case Buffer::kInner:
      return inner_;
    case Buffer::kExperts:
      return experts_;
    case Buffer::kGated:
      return gated_;
    case Buffer::kEmbedded:
      return embedded_ != nullptr ? embedded_ : shared_;
    default:
      return shared_;
  }
}

}  // namespace embert
