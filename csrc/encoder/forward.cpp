// A batch from token ids to vectors: the ops of the model's program (README.md has them as a table), then the heads
// (heads.cpp). The host decides by what it knows before the batch runs, so the same launches can be captured as a
// graph.

#include "attention/attention.h"
#include "common/nvtx.h"
#include "encoder/encoder.h"
#include "heads/heads.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/norm.h"

namespace embert {
namespace {

// From this many rows on, the last layer's GEMMs run only on the rows that pooling reads, where it reads one a
// sequence. Below, by count, gathering them costs a launch and saves no more than that.
constexpr int kGatherRows = 128;

}  // namespace

Status Encoder::inspect(const RowView& rows, int count, const Stream& stream) {
  if (largest_offset_.bytes() == 0 || model_.rms_norm) return {};  // RMSNorm has no μ
  return row_offsets(rows, count, model_.hidden, model_.epsilon, largest_offset_.as<float>(), stream);
}

uint8_t* Encoder::memory_of(Buffer place) const {
  const size_t column = size_t(row_capacity_) * bytes_of(model_.dtype);
  switch (place) {
    case Buffer::kX:
      return buffers_.x;
    case Buffer::kSum:
      return buffers_.sum;
    case Buffer::kContext:
      return buffers_.shared + model_.qkv_columns() * column;
    case Buffer::kInner:
      return buffers_.shared + program_.inner_from * column;
    default:
      return buffers_.shared;
  }
}

const float* Encoder::factors_of(const NormRef& norm) const {
  return prescaled_rows_ ? weights_.norm(norm).gamma : nullptr;
}

RopeColumns Encoder::rope_columns(int layer) const {
  const LayerAttention layer_attention = model_.attention_of(layer);
  return {model_.head_size(), layer_attention.rotary_dim, model_.attention_columns() + model_.key_columns(),
          layer_attention.rotary_dim == 0 ? nullptr : weights_.angles(layer_attention.table),
          buffers_.offsets.positions};
}

Status Encoder::forward(const Plan& plan, const Stream& stream) {
  EMBERT_NVTX_RANGE("encoder forward");
  const OffsetsOutput& offsets = buffers_.offsets;
  Replay replay{plan, {offsets.tiles, plan.tiles, offsets.shorts, plan.shorts}, stream, plan.rows, {}};
  // Not while rows are inspected: all rows of the last layer are needed, because token vectors use them. Nor with
  // norms after both parts: kX keeps the residual, and gathered rows are elsewhere.
  const bool gathers = reads_one_row(plan.outputs, replay.gathered) && plan.rows >= kGatherRows &&
                       2 * plan.sequences <= plan.rows && largest_offset_.bytes() == 0 && !model_.sublayer_norms &&
                       model_.gathered_columns() <= 2 * model_.qkv_columns();
  if (gathers) replay.gathers_after = model_.layers - 1;
  for (const Op& op : program_.steps) EMBERT_TRY(run_op(op, replay));
  return run_heads(plan, replay.rows[int(Buffer::kX)], gathers, stream);
}

Status Encoder::run_op(const Op& op, Replay& replay) {
  EMBERT_NVTX_RANGE(name_of(op.action));
  const DType dtype = model_.dtype;
  const int count = replay.count;
  Stream& stream = replay.stream;
  const RowView x = replay.rows[int(op.x)];
  uint8_t* const to = memory_of(op.y);
  float2* const sums = op.writes_stats ? stats_of(op.y) : nullptr;
  RowView y{to, sums};
  switch (op.action) {
    case OpKind::kEmbed:
      EMBERT_TRY(embed_batch(op, replay));
      break;
    case OpKind::kGemm: {
      // A GEMM that applies no LayerNorm uses its rows unchanged.
      const GemmPlan& plan = program_.gemms[op.gemm];
      RowView from = x, residual = replay.rows[int(op.residual)];
      if (!plan.input.exists()) from.stats = nullptr;
      if (!plan.residual.exists()) residual.stats = nullptr;
      EMBERT_TRY(gemms_[op.gemm].linear->run(from, residual, count, to, sums, y.splits, stream.alternate_direction()));
      break;
    }
    case OpKind::kFeedForward:
      EMBERT_TRY(gemms_[op.gemm].fused->run(x, count, memory_of(Buffer::kInner), to, sums, y.splits, stream));
      break;
    case OpKind::kRope:
      if (model_.qk_norm) {
        EMBERT_TRY(qk_norm_rope(dtype, to, count, model_.qkv_columns(), weights_.head_norms(op.layer),
                                rope_columns(op.layer), stream));
      } else {
        EMBERT_TRY(rope_rows(dtype, to, count, model_.qkv_columns(), rope_columns(op.layer), stream));
      }
      break;
    case OpKind::kAttend:
      return attend(op, replay);
    case OpKind::kGate:
      EMBERT_TRY(gate_rows(dtype, model_.activation, x.data, count, model_.inner, to, stream));
      break;
    case OpKind::kNormalize: {
      const Norm norm = weights_.norm(op.norm);
      EMBERT_TRY(model_.rms_norm ? rmsnorm(dtype, x.data, norm.gamma, count, model_.hidden, model_.epsilon, to, stream)
                                 : layernorm(dtype, x.data, norm, count, model_.hidden, model_.epsilon, to, stream));
      break;
    }
    case OpKind::kAddNormalized:
      EMBERT_TRY(add_rmsnorm(dtype, x.data, weights_.norm(op.norm).gamma, count, model_.hidden, model_.epsilon, to,
                             factors_of(op.before), factors_of(op.next), sums, stream));
      break;
  }
  replay.rows[int(op.y)] = y;
  return op.writes_stats ? inspect(y, count, stream) : Status();
}

Status Encoder::embed_batch(const Op& op, Replay& replay) {
  const Plan& plan = replay.plan;
  const Stream& stream = replay.stream;
  const InputLayout layout(plan.rows, plan.sequences);
  const auto field = [&](size_t offset) { return reinterpret_cast<const int*>(plan.input + offset); };
  const OffsetsInput input{field(0), field(layout.lengths), field(layout.ids), field(layout.types),
                           reinterpret_cast<const uint32_t*>(field(layout.cuts))};
  const OffsetsOutput& offsets = buffers_.offsets;
  const OffsetsCapacity capacity{plan.rows, plan.sequences, plan.tiles, plan.shorts};
  const int columns = model_.embedding_columns();
  uint8_t* const to = memory_of(op.y);
  EmbeddingTables tables = weights_.tables();
  tables.prescaled_rows = prescaled_rows_;
  // One launch for few rows, where the device has clusters; it writes row statistics, and no positions.
  const bool small = plan.on_host && op.writes_stats && plan.rows <= kSmallRows && stream.dependent_launch;
  if (small && model_.angle_tables().empty())
    return embed_small(model_.dtype, tables, input, layout.bytes, offsets, capacity, columns, to, stats_of(op.y),
                       stream);
  EMBERT_TRY(compute_offsets(input, offsets, capacity, stream));
  if (plan.positions != nullptr) {
    EMBERT_CUDA(cudaMemcpyAsync(offsets.positions, plan.positions, size_t(plan.rows) * sizeof(int),
                                cudaMemcpyHostToDevice, stream.handle));
  }
  if (!model_.embedding_norm || model_.projects_first)
    return embed_words(model_.dtype, tables.word, offsets.ids, plan.rows, columns, model_.embedding_scale, to,
                       factors_of(op.next), op.writes_stats ? stats_of(op.y) : nullptr, stream);
  // Without a position table every row uses the same one, of zeros.
  const int* const positions = model_.position_table ? offsets.positions : buffers_.zeros;
  return embed(model_.dtype, tables, offsets.ids, offsets.types, positions, plan.rows, columns, model_.epsilon, to,
               op.writes_stats ? stats_of(op.y) : nullptr, stream);
}

Status Encoder::attend(const Op& op, Replay& replay) {
  const bool gathers = op.layer == replay.gathers_after;
  const Pooling row = replay.gathered;
  uint8_t* const qkv = memory_of(op.x);
  uint8_t* const context = memory_of(op.y);
  // Only models with RoPE use tiles for long texts: for others they are not measured.
  const int longest = model_.angle_tables().empty() ? 0 : replay.plan.longest;
  WindowedWork work(replay.work, model_.attention_of(op.layer).window, longest);
  if (gathers) work.queries = row == Pooling::kCls ? Queries::kFirst : Queries::kLast;
  const int head_size = model_.head_size();
  if (!gathers && gemms_[op.gemm].linear->supports_blocks(replay.count) &&
      attention_writes_blocks(model_.dtype, work, head_size, maps_.get())) {
    const QuantizedBlocks blocks = QuantizedBlocks::in(context, replay.count, model_.hidden);
    EMBERT_TRY(attention_in_blocks(qkv, replay.count, work, model_.heads, weights_.relative(), blocks, *maps_,
                                   replay.stream.alternate_direction()));
    replay.rows[int(op.y)] = {context, nullptr, 1, blocks.maxima};
    return {};
  }
  if (model_.distance_rows > 0) {
    EMBERT_TRY(attention_sm80_disentangled(model_.dtype, qkv, work, model_.attention_heads(),
                                           weights_.distances(op.layer), context, replay.stream.alternate_direction()));
  } else {
    EMBERT_TRY(attention(model_.dtype, qkv, replay.count, work, model_.attention_heads(), weights_.relative(), context,
                         maps_.get(), replay.stream.alternate_direction()));
  }
  replay.rows[int(op.y)] = {context};
  if (!gathers) return {};
  // The rows that heads read are copied to QKV's memory, and only they are processed further. They have been read when
  // the inner activations are written there.
  RowView& x = replay.rows[int(Buffer::kX)];
  const size_t column = size_t(row_capacity_ / 2) * bytes_of(model_.dtype);  // of at most half of the rows
  uint8_t *const x_to = qkv + model_.attention_columns() * column, *const sums_to = x_to + model_.hidden * column;
  auto* const sums = folds_ ? reinterpret_cast<float2*>(sums_to) : nullptr;
  EMBERT_TRY(gather(model_.dtype, context, model_.attention_columns(), x, buffers_.offsets.cu_seqlens, row,
                    replay.plan.sequences, model_.hidden, qkv, x_to, sums, replay.stream));
  replay.rows[int(op.y)] = {qkv};
  x = {x_to, x.stats == nullptr ? nullptr : sums, x.splits};
  replay.count = replay.plan.sequences;
  return {};
}

bool Encoder::reads_one_row(const TaskOutputs& outputs, Pooling& pooling) const {
  if (outputs.requests(Tasks(~kRowTasks))) return false;
  const bool embeds = outputs.requests(bit(Task::kEmbed)), classifies = outputs.requests(bit(Task::kClassify));
  if (embeds && classifies && model_.pooling != model_.classifier_pooling) return false;
  pooling = classifies ? model_.classifier_pooling : model_.pooling;
  return pooling == Pooling::kCls || pooling == Pooling::kLast;
}

}  // namespace embert
