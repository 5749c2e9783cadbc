// A batch from token ids to vectors, as a list of launches (README.md has it as a table). The host decides by what it
// knows before the batch runs, so the same list can be captured as a graph. Its end is heads.cpp.

#include "attention/attention.h"
#include "embedding/embedding.h"
#include "heads/pooling.h"
#include "norm/layernorm.h"
#include "runtime/encoder.h"

namespace embert {
namespace {

// From so many rows on, the last layer's products run on the rows that pooling reads, where it reads one a sequence.
// Below, by count, gathering them costs a launch and saves no more than that.
constexpr int kGatherRows = 128;

}  // namespace

Status Encoder::inspect(const Rows& rows, int count, const Stream& stream) {
  if (largest_offset_.bytes() == 0) return {};
  return row_offsets(rows, count, shape_.hidden, shape_.epsilon, largest_offset_.as<float>(), stream);
}

Status Encoder::forward(const Plan& plan, const Stream& stream) {
  const DType dtype = shape_.dtype;
  const int hidden = shape_.hidden, rows = plan.rows;
  const InputLayout layout(plan.rows, plan.sequences);
  const auto part = [&](size_t offset) { return reinterpret_cast<const int*>(plan.input + offset); };
  const OffsetsInput input{part(0), part(layout.lengths), part(layout.ids), part(layout.types),
                           reinterpret_cast<const uint32_t*>(part(layout.cuts))};
  const OffsetsOutput& offsets = at_.offsets;
  const OffsetsCapacity capacity{rows, plan.sequences, plan.tiles, plan.shorts};
  AttentionWork work{offsets.tiles, plan.tiles, 0, offsets.shorts, plan.shorts};
  uint8_t* const qkv = at_.wide;
  uint8_t* const context = at_.wide + size_t(row_capacity_) * 3 * hidden * bytes_of(dtype);
  // x: the layer's input. sum: the rows between attention and the feed-forward part. Where LayerNorms are folded, both
  // are stored before their LayerNorm, or times its gamma, with the sums of their rows.
  Rows x{at_.x, folds_ ? at_.x_sums : nullptr}, sum{at_.sum, folds_ ? at_.sum_sums : nullptr};
  EmbeddingTables tables = weights_.tables();
  tables.gamma_in_rows = gamma_in_rows_;
  if (plan.on_host && folds_ && rows <= kSmallRows) {
    EMBERT_TRY(embed_small(dtype, tables, input, layout.bytes, offsets, capacity, hidden, at_.x, at_.x_sums, stream));
  } else {
    EMBERT_TRY(compute_offsets(input, offsets, capacity, stream));
    if (plan.positions != nullptr) {
      EMBERT_CUDA(cudaMemcpyAsync(offsets.positions, plan.positions, size_t(rows) * sizeof(int), cudaMemcpyHostToDevice,
                                  stream.handle));
    }
    EMBERT_TRY(embed(dtype, tables, offsets.ids, offsets.types, offsets.positions, rows, hidden, shape_.epsilon, at_.x,
                     folds_ ? at_.x_sums : nullptr, stream));
  }
  EMBERT_TRY(inspect(x, rows, stream));
  // Not while rows are inspected: all rows of the last layer have to be, because token vectors use them.
  Pooling row = Pooling::kCls;
  const bool gathers = reads_one_row(plan.parts, row) && rows >= kGatherRows && 2 * plan.sequences <= rows &&
                       largest_offset_.bytes() == 0;
  Stream along = stream;
  for (int i = 0; i < shape_.layers; ++i) {
    int none = 0;
    EMBERT_TRY(products_[i].qkv->run(x, {}, rows, qkv, nullptr, none, along.turned()));
    const bool gathers_here = gathers && i == shape_.layers - 1;
    if (gathers_here) work.queries = row == Pooling::kCls ? Queries::kFirst : Queries::kLast;
    EMBERT_TRY(attention(dtype, qkv, rows, work, shape_.heads, shape_.head_size(), weights_.relative(), context,
                         maps_.get(), along.turned()));
    if (!gathers_here) {
      EMBERT_TRY(after_attention(i, {context}, x, rows, x, sum, along));
      continue;
    }
    // The rows that pooling reads are copied to QKV's memory, and only they go on.
    const size_t room = size_t(row_capacity_) * hidden * bytes_of(dtype);
    auto* const sums = folds_ ? reinterpret_cast<float2*>(qkv + 2 * room) : nullptr;
    EMBERT_TRY(
        gather(dtype, context, x, offsets.cu_seqlens, row, plan.sequences, hidden, qkv, qkv + room, sums, stream));
    EMBERT_TRY(after_attention(i, {qkv}, {qkv + room, sums, x.parts}, plan.sequences, x, sum, along));
  }
  return run_heads(plan, x, gathers, stream);
}

bool Encoder::reads_one_row(const Parts& parts, Pooling& which) const {
  if (parts.wants(Tasks(~kRowTasks))) return false;
  const bool embeds = parts.wants(bit(Task::kEmbed)), classifies = parts.wants(bit(Task::kClassify));
  if (embeds && classifies && shape_.pooling != Pooling::kCls) return false;
  which = classifies ? Pooling::kCls : shape_.pooling;
  return which == Pooling::kCls || which == Pooling::kLast;
}

Status Encoder::after_attention(int layer, const Rows& attended, const Rows& residual, int count, Rows& x, Rows& sum,
                                Stream& along) {
  const LayerWeights& w = weights_.layer(layer);
  const LayerProducts& p = products_[layer];
  uint8_t* const inner = at_.wide;
  int none = 0;
  if (folds_) {
    EMBERT_TRY(p.attention_out->run(attended, residual, count, at_.sum, at_.sum_sums, sum.parts, along.turned()));
    EMBERT_TRY(inspect(sum, count, along));
    EMBERT_TRY(p.feed_forward->run(sum, count, inner, at_.x, at_.x_sums, x.parts, along));
    return inspect(x, count, along);
  }
  const auto normalise = [&](const Norm& norm) {
    return layernorm(shape_.dtype, at_.sum, norm, count, shape_.hidden, shape_.epsilon, at_.x, along);
  };
  EMBERT_TRY(p.attention_out->run(attended, residual, count, at_.sum, nullptr, none, along.turned()));
  EMBERT_TRY(normalise(w.attention_norm));
  EMBERT_TRY(p.feed_forward->run(x, count, inner, at_.sum, nullptr, none, along));
  return normalise(w.out_norm);
}

}  // namespace embert
