#include "encoder/activations.h"

#include <algorithm>
#include <iterator>

#include "encoder/batch.h"

namespace embert {

Status Activations::allocate(const EncoderConfig& model, const Program& program, int max_tokens, bool folds, int widest,
                             const Stream& stream) {
  row_capacity_ = std::max((max_tokens + 127) / 128 * 128, kTokenBuckets[std::size(kTokenBuckets) - 1]);
  sequences_ = std::min(row_capacity_, 65535);
  const TaskHeads& heads = model.task_heads;
  const size_t element = bytes_of(model.dtype), hidden = model.hidden, rows = row_capacity_;
  const size_t column = column_bytes_ = rows * element,
               columns = std::max({program.widest, heads.multi_scratch_columns(), widest});
  head_floats_ = size_t(sequences_) * heads.widest(model.hidden);
  multi_bytes_ = rows * heads.multi_scratch_columns() / 2 * element;
  // Of experts: rows of kInner and of kExperts.
  routed_.kind = {model.experts, model.top_k};
  const size_t tiles = model.expert_layers.empty() ? 0 : max_expert_tiles(routed_.kind, rows);
  const size_t outputs = program.groups_experts ? tiles * kExpertTile : rows * model.experts;
  const size_t inner_bytes = (program.groups_experts ? outputs : rows) * model.inner * element;
  const size_t expert_bytes = tiles == 0 ? 0 : inner_bytes + outputs * hidden * element;
  for (int pass = 0; pass < 2; ++pass) {
    Arena arena(arena_->as());
    uint8_t* const x = arena.take(hidden * column);
    uint8_t* const sum = arena.take(hidden * column);
    uint8_t* const embedded = model.layer_inputs > 0 ? arena.take(hidden * column) : nullptr;
    shared_ = arena.take(std::max({columns * column, 2 * head_floats_ * sizeof(float), expert_bytes}));
    if (folds) {
      x_stats_ = arena.take<float2>(stats_count(row_capacity_, model.hidden));
      sum_stats_ = arena.take<float2>(stats_count(row_capacity_, model.hidden));
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
    offsets_.tiles = arena.take<AttentionTile>(max_tiles(row_capacity_, sequences_));
    offsets_.shorts = arena.take<AttentionTile>(sequences_);
    rows_.fill(shared_);
    rows_[int(Buffer::kX)] = x;
    rows_[int(Buffer::kSum)] = sum;
    rows_[int(Buffer::kContext)] += program.context_from * column;
    rows_[int(Buffer::kInner)] += program.inner_from * column;
    rows_[int(Buffer::kGated)] += model.layer_inputs * column;
    rows_[int(Buffer::kExperts)] += inner_bytes;
    if (embedded != nullptr) rows_[int(Buffer::kEmbedded)] = embedded;
    if (pass == 0) EMBERT_TRY(arena_->allocate(arena.used()));
  }
  // Batches that are rounded up compute rows that nothing reads. Zeros keep them finite.
  EMBERT_CUDA(cudaMemsetAsync(arena_->as(), 0, arena_->bytes(), stream.handle));
  return {};
}

Activations Activations::of(const Program& program) const {
  Activations same = *this;
  same.rows_[int(Buffer::kContext)] = shared_ + program.context_from * column_bytes_;
  same.rows_[int(Buffer::kInner)] = shared_ + program.inner_from * column_bytes_;
  return same;
}

}  // namespace embert
