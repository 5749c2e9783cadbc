#include "encoder/forward.h"

#include <array>
#include <optional>

#include "attention/attention.h"
#include "common/nvtx.h"
#include "ops/convolution.h"
#include "ops/elementwise.h"
#include "ops/embedding.h"
#include "ops/experts.h"
#include "ops/norm.h"

namespace embert {
namespace {

// One replay of a program.
class Replay {
 public:
  // before: the model whose last rows a decider continues.
  Replay(const DeviceModel& model, const BatchPlan& plan, const Stream& stream, const DeviceModel* before = nullptr)
      : model_(model),
        before_(before),
        config_(model.config),
        buffers_(model.activations),
        plan_(plan),
        stream_(stream) {
    // While rows are inspected, all rows of the last layer are needed.
    if (!inspects()) gathered_ = gathered_row(plan, config_);
  }

  Status run(LastRows& last) {
    for (const Op& op : model_.program.steps) EMBERT_TRY(run_op(op));
    last = {rows_of(Buffer::kX), gathered_.has_value()};
    return {};
  }

 private:
  RowView& rows_of(Buffer buffer) { return rows_[int(buffer)]; }
  bool inspects() const { return model_.largest_offset.bytes() > 0; }
  float2* stats_of(const Op& op) const { return op.writes_stats ? buffers_.stats(op.y) : nullptr; }
  Status run_op(const Op& op);
  Status embed_batch(const Op& op);
  bool gathers(const Op& op) const { return gathered_ && op.layer == config_.layers - 1; }
  Status attend(const Op& op);
  Status convolve(const Op& op);
  Status run_experts(const Op& op);
  Status gather_rows(const Op& op);

  const DeviceModel& model_;
  const DeviceModel* const before_;
  const EncoderConfig& config_;
  const Activations& buffers_;
  const BatchPlan& plan_;
  Stream stream_;
  std::optional<Pooling> gathered_;       // after the last layer's attention only these rows are processed
  int count_ = plan_.rows;                // of rows
  std::array<RowView, kBuffers> rows_{};  // as the last op left them
};

Status Replay::run_op(const Op& op) {
  EMBERT_NVTX_RANGE(name_of(op.action));
  const DType dtype = config_.dtype;
  const Weights& weights = model_.weights;
  const RowView x = rows_of(op.x);
  uint8_t* const to = buffers_.rows(op.y);
  float2* const sums = stats_of(op);
  RowView y{to, sums};
  switch (op.action) {
    case OpKind::kEmbed:
      EMBERT_TRY(embed_batch(op));
      break;
    case OpKind::kGemm: {
      // A GEMM that applies no LayerNorm uses its rows unchanged.
      const GemmPlan& plan = model_.program.gemms[op.gemm];
      RowView from = x, residual = rows_of(op.residual);
      if (!plan.input.exists()) from.stats = nullptr;
      if (!plan.residual.exists()) residual.stats = nullptr;
      EMBERT_TRY(
          model_.gemms[op.gemm].linear->run(from, residual, count_, to, sums, y.splits, stream_.alternate_direction()));
      break;
    }
    case OpKind::kFeedForward:
      EMBERT_TRY(
          model_.gemms[op.gemm].fused->run(x, count_, buffers_.rows(Buffer::kInner), to, sums, y.splits, stream_));
      break;
    case OpKind::kRope: {
      const RopeColumns rope = model_.rope_columns(op.layer);
      const AttentionHeads heads = config_.attention_heads(op.layer);
      const int pitch = heads.qkv_columns(), values = config_.value_norm ? heads.kv_heads : 0;
      EMBERT_TRY(config_.qk_norm
                     ? qk_norm_rope(dtype, to, count_, pitch, weights.head_norms(op.layer), rope, values, stream_)
                     : rope_rows(dtype, to, count_, pitch, rope, stream_));
      break;
    }
    case OpKind::kAttend:
      return attend(op);
    case OpKind::kConvolve:
      return convolve(op);
    case OpKind::kGate:
      EMBERT_TRY(gate_rows(dtype, config_.activation, x.data, count_, config_.inner, to, stream_));
      break;
    case OpKind::kExperts:
      EMBERT_TRY(run_experts(op));
      break;
    case OpKind::kNormalize: {
      const Norm norm = weights.norm(op.norm);
      EMBERT_TRY(config_.rms_norm
                     ? rmsnorm(dtype, x.data, norm.gamma, count_, config_.hidden, config_.epsilon, to, stream_)
                     : layernorm(dtype, x.data, norm, count_, config_.hidden, config_.epsilon, to, stream_));
      break;
    }
    case OpKind::kAddNormalized:
      EMBERT_TRY(add_rmsnorm(dtype, x.data, weights.norm(op.norm).gamma, count_, config_.hidden, config_.epsilon, to,
                             weights.divisors(op), weights.factors(op.next), sums, stream_));
      break;
    case OpKind::kTimesNormalized:
      // The embeddings are not divided by √hidden before their product, but ε is multiplied by what that would divide.
      EMBERT_TRY(multiply_rmsnorm(dtype, x.data, weights.norm(op.norm).gamma, count_, config_.layer_inputs,
                                  config_.epsilon * config_.hidden, to, stream_));
      break;
  }
  rows_of(op.y) = y;
  if (sums == nullptr || !inspects() || config_.rms_norm) return {};  // RMSNorm has no μ
  return row_offsets(y, count_, config_.hidden, config_.epsilon, model_.largest_offset.as<float>(), stream_);
}

Status Replay::embed_batch(const Op& op) {
  const InputLayout layout(plan_.rows, plan_.sequences);
  const auto field = [&](size_t offset) { return reinterpret_cast<const int*>(plan_.input + offset); };
  const OffsetsInput input{field(0), field(layout.lengths), field(layout.ids), field(layout.types),
                           reinterpret_cast<const uint32_t*>(field(layout.cuts))};
  const OffsetsOutput& offsets = buffers_.offsets();
  // Where work lists come from the host, what offsets.cu writes is not read.
  const bool lists = plan_.work == nullptr;
  const OffsetsCapacity capacity{plan_.rows, plan_.sequences, lists ? plan_.tiles : 0, lists ? plan_.shorts : 0};
  const int columns = config_.embedding_columns();
  uint8_t* const to = buffers_.rows(op.y);
  float2* const sums = stats_of(op);
  EmbeddingTables tables = model_.weights.tables();
  if (before_ != nullptr)
    return add_types(config_.dtype, before_->last_norm(), before_->config.epsilon, tables.type, offsets.types,
                     plan_.rows, columns, to, sums, stream_);
  tables.prescaled_rows = model_.weights.prescales_rows();
  EMBERT_TRY(compute_offsets(input, offsets, capacity, stream_));
  if (plan_.positions != nullptr) {
    EMBERT_CUDA(cudaMemcpyAsync(offsets.positions, plan_.positions, size_t(plan_.rows) * sizeof(int),
                                cudaMemcpyHostToDevice, stream_.handle));
  }
  if (!config_.embedding_norm || config_.projects_first) {
    const auto words = [&](void* rows, const float* factors, float2* row_sums) {
      return embed_words(config_.dtype, tables.word, offsets.ids, plan_.rows, columns, config_.embedding_scale, rows,
                         factors, row_sums, stream_);
    };
    if (config_.layer_inputs > 0) {
      rows_of(Buffer::kEmbedded) = {buffers_.rows(Buffer::kEmbedded)};
      EMBERT_TRY(words(buffers_.rows(Buffer::kEmbedded), nullptr, nullptr));
    }
    return words(to, model_.weights.factors(op.next), sums);
  }
  // Without a position table every row uses the same one, of zeros.
  const int* const positions = config_.position_table ? offsets.positions : buffers_.zeros();
  return embed(config_.dtype, tables, offsets.ids, offsets.types, positions, plan_.rows, columns, config_.epsilon, to,
               sums, stream_);
}

Status Replay::attend(const Op& op) {
  const AttentionHeads heads = config_.attention_heads(op.layer);
  uint8_t *const qkv = buffers_.rows(op.x), *const context = buffers_.rows(op.y);
  const OffsetsOutput& offsets = buffers_.offsets();
  WindowedWork work({offsets.tiles, plan_.tiles, offsets.shorts, plan_.shorts}, config_.attention_of(op.layer).window);
  if (plan_.work != nullptr) {
    const WorkLayout layout(plan_.tiles, plan_.shorts);
    work.tiles = reinterpret_cast<const AttentionTile*>(plan_.work);
    work.shorts = reinterpret_cast<const AttentionTile*>(plan_.work + layout.shorts);
    if (plan_.has_prefixes) work.prefixes = reinterpret_cast<const TilePrefix*>(plan_.work + layout.prefixes);
  }
  if (gathers(op)) work.queries = *gathered_ == Pooling::kCls ? Queries::kFirst : Queries::kLast;
  const RelativeScores relative = model_.weights.relative();
  TensorMaps* const maps = model_.maps.get();
  const Stream& stream = stream_.alternate_direction();
  if (!gathers(op) && model_.gemms[op.gemm].linear->supports_blocks(count_) &&
      attention_writes_blocks(config_.dtype, work, heads.head_size, maps)) {
    const QuantizedBlocks blocks = QuantizedBlocks::in(context, count_, config_.hidden);
    rows_of(op.y) = {context, nullptr, 1, blocks.maxima};
    return attention_in_blocks(qkv, count_, work, config_.heads, relative, blocks, *maps, stream);
  }
  rows_of(op.y) = {context};
  EMBERT_TRY(config_.distance_rows > 0
                 ? attention_sm80_disentangled(config_.dtype, qkv, work, heads, model_.weights.distances(op.layer),
                                               context, stream)
                 : attention(config_.dtype, qkv, count_, work, heads, relative, context, maps, stream));
  return gathers(op) ? gather_rows(op) : Status();
}

Status Replay::convolve(const Op& op) {
  const LayerAttention attention = config_.attention_of(op.layer);
  const Convolution convolution{attention.taps, attention.after, model_.weights.layer(op.layer).taps};
  uint8_t *const x = buffers_.rows(op.x), *const context = buffers_.rows(op.y);
  rows_of(op.y) = {context};
  if (plan_.hides_tokens) {
    const auto* const tiles = reinterpret_cast<const AttentionTile*>(plan_.work);  // shorts follow them
    const float* const bias = model_.weights.layer(op.layer).matrices[int(Matrix::kQkv)].bias;
    EMBERT_TRY(clear_hidden_rows(config_.dtype, tiles, plan_.tiles + plan_.shorts, bias, config_.hidden, x, stream_));
  }
  EMBERT_TRY(convolve_rows(config_.dtype, x, buffers_.offsets().positions, convolution, count_, config_.hidden, context,
                           stream_));
  return gathers(op) ? gather_rows(op) : Status();
}

Status Replay::run_experts(const Op& op) {
  const LayerWeights& weights = model_.weights.layer(op.layer);
  const RoutedRows& routed = buffers_.routed();
  const void* const x = rows_of(op.x).data;
  uint8_t* const outputs = buffers_.rows(Buffer::kExperts);
  EMBERT_TRY(route_rows(config_.dtype, x, weights.router, count_, config_.hidden, routed, stream_));
  EMBERT_TRY(model_.experts[op.layer]->run(x, count_, routed, buffers_.rows(Buffer::kInner), outputs, stream_));
  return combine_rows(config_.dtype, x, outputs, routed, weights.experts_bias, model_.weights.norm(op.norm), count_,
                      config_.hidden, config_.epsilon, buffers_.rows(op.y), stream_);
}

// The rows that heads read are copied to QKV's memory, and only they are processed further. They have been read when
// the inner activations are written there.
Status Replay::gather_rows(const Op& op) {
  RowView& x = rows_of(Buffer::kX);
  uint8_t* const context_to = buffers_.rows(op.x);
  // At most half of the rows are gathered.
  const size_t column = size_t(buffers_.row_capacity() / 2) * bytes_of(config_.dtype);
  const int columns = config_.context_columns(op.layer);
  uint8_t* const x_to = context_to + columns * column;
  auto* const sums = model_.folds ? reinterpret_cast<float2*>(x_to + config_.hidden * column) : nullptr;
  EMBERT_TRY(gather(config_.dtype, buffers_.rows(op.y), columns, x, buffers_.offsets().cu_seqlens, *gathered_,
                    plan_.sequences, config_.hidden, context_to, x_to, sums, stream_));
  rows_of(op.y) = {context_to};
  x = {x_to, x.stats == nullptr ? nullptr : sums, x.splits};
  count_ = plan_.sequences;
  return {};
}

}  // namespace

Status forward(const DeviceModel& model, const DeviceModel* decider, const BatchPlan& plan, const Stream& stream) {
  EMBERT_NVTX_RANGE("encoder forward");
  LastRows last{};
  EMBERT_TRY(Replay(model, plan, stream).run(last));
  EMBERT_TRY(run_heads(model, plan, last, stream));
  if (decider == nullptr || !plan.outputs.requests(bit(Task::kClassify))) return {};
  EMBERT_TRY(Replay(*decider, plan, stream, &model).run(last));
  return run_decider_head(*decider, model.config.task_heads.marker, plan, last, stream);
}

}  // namespace embert
