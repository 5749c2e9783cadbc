// The end of a forward pass: from the last layer's rows to the requested tasks, each head for the sequences that
// request it. Heads that read rows before their LayerNorm come first, because the others normalize the rows in place.

#include "heads/heads.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "encoder/forward.h"
#include "ops/norm.h"

namespace embert {
namespace {

class Heads {
 public:
  Heads(const DeviceModel& model, const BatchPlan& plan, const LastRows& rows, const Stream& stream)
      : model_(model), config_(model.config), buffers_(model.activations), plan_(plan), rows_(rows), stream_(stream) {}

  Status run() const {
    const TaskOutputs& outputs = plan_.outputs;
    const bool sparse = outputs.requests(bit(Task::kSparse)), pairs = sparse && model_.splade != nullptr;
    if (outputs.requests(bit(Task::kEmbed))) EMBERT_TRY(embed());
    const bool scores = output_of(Task::kClassify).spans != nullptr;
    if (outputs.requests(bit(Task::kClassify)) && !config_.task_heads.classifier.empty()) EMBERT_TRY(classify());
    if (outputs.requests(bit(Task::kLabelMass))) EMBERT_TRY(sum_vocabulary());
    if (sparse && !pairs) EMBERT_TRY(weigh_tokens());
    if (!outputs.requests(bit(Task::kTokens) | bit(Task::kMulti)) && !pairs && !scores) return {};
    uint8_t* const x = buffers_.rows(Buffer::kX);
    if (model_.program.last.exists()) EMBERT_TRY(normalize(x, model_.last_norm()));
    if (pairs) EMBERT_TRY(find_pairs());
    if (outputs.requests(bit(Task::kMulti)) || scores) EMBERT_TRY(project_tokens());
    return outputs.requests(bit(Task::kTokens)) ? store_tokens(Task::kTokens, x, false) : Status();
  }

  Status decide(int marker) const {
    const TaskOutput& output = output_of(Task::kClassify);
    const HeadWeights& weights = model_.weights.heads();
    if (model_.program.last.exists()) EMBERT_TRY(normalize(buffers_.rows(Buffer::kX), model_.last_norm()));
    const uint8_t* x = nullptr;
    EMBERT_TRY(multiply_rows(x));
    const OffsetsOutput& offsets = buffers_.offsets();
    return marker_logits(config_.dtype, x, offsets.ids, offsets.cu_seqlens, output.chosen, output.rows, marker,
                         config_.hidden, weights.token_weight, weights.token_bias, output.columns, output.out, stream_);
  }

 private:
  const TaskOutput& output_of(Task task) const { return plan_.outputs.task_output(task); }

  Status normalize(void* rows, const Norm& norm) const {
    return layernorm(config_.dtype, rows, norm, plan_.rows, config_.hidden, config_.epsilon, rows, stream_);
  }

  Status pool_rows(Pooling pooling, const TaskOutput& output, const uint32_t* cuts, float* to) const {
    return pool(config_.dtype, pooling, rows_.view, rows_.gathered, model_.last_norm(), config_.epsilon,
                buffers_.offsets().cu_seqlens, cuts, output.chosen, output.rows, config_.hidden, to, stream_);
  }

  // From the first half of the heads' rows through all layers. The last one writes `to`; null: the rows it leaves.
  Status run_layers(const std::vector<DenseLayer>& layers, int rows, float*& to) const {
    float *from = buffers_.head_rows(0), *next = buffers_.head_rows(1);
    for (size_t i = 0; i < layers.size(); ++i) {
      const bool is_last = i + 1 == layers.size();
      const int out = layers[i].shape.out;
      float* const y = is_last && to != nullptr ? to : next;
      EMBERT_TRY(dense(from, rows, layers[i], y, is_last ? out : dense_pitch(out), stream_));
      next = std::exchange(from, y);
    }
    to = from;
    return {};
  }

  Status embed() const {
    const TaskOutput& output = output_of(Task::kEmbed);
    const std::vector<DenseLayer>& layers = model_.weights.heads().dense;
    const uint32_t* const cuts = buffers_.offsets().cuts;
    if (layers.empty()) return pool_rows(config_.pooling, output, cuts, output.out);
    EMBERT_TRY(pool_rows(config_.pooling, output, nullptr, buffers_.head_rows(0)));
    float* vectors = nullptr;
    EMBERT_TRY(run_layers(layers, output.rows, vectors));
    return cut_rows(vectors, cuts, output.chosen, output.rows, output.columns, output.out, stream_);
  }

  Status classify() const {
    const TaskOutput& output = output_of(Task::kClassify);
    EMBERT_TRY(pool_rows(config_.classifier_pooling, output, nullptr, buffers_.head_rows(0)));
    float* logits = output.out;
    return run_layers(model_.weights.heads().classifier, output.rows, logits);
  }

  Status sum_vocabulary() const {
    const TaskOutput& output = output_of(Task::kLabelMass);
    float* const rows = buffers_.head_rows(0);
    EMBERT_TRY(pool_rows(config_.pooling, output, nullptr, rows));
    return vocabulary_mass(config_.dtype, rows, output.rows, model_.weights.heads().vocabulary, config_.vocabulary,
                           config_.hidden, buffers_.head_rows(1), buffers_.head_floats(), output.out, stream_);
  }

  Status weigh_tokens() const {
    const TaskOutput& output = output_of(Task::kSparse);
    const HeadWeights& weights = model_.weights.heads();
    return token_weights(config_.dtype, rows_.view, model_.last_norm(), config_.epsilon, output.chosen, output.rows,
                         config_.hidden, weights.token_weight, weights.token_bias, output.out, stream_);
  }

  // Rows are transformed in kSum's memory, which is free after the last layer.
  Status find_pairs() const {
    const TaskOutput& output = output_of(Task::kSparse);
    SpladeBatch batch{};
    batch.x = buffers_.rows(Buffer::kX);
    batch.scratch = buffers_.rows(Buffer::kSum);
    batch.rows = plan_.rows;
    batch.texts = output.sequences;
    batch.cu_seqlens = buffers_.offsets().cu_seqlens;
    batch.chosen = output.chosen;
    batch.host_cu_seqlens = plan_.cu_seqlens;
    batch.host_chosen = output.chosen_on_host;
    return model_.splade->run(batch, *plan_.pairs, stream_);
  }

  // The GEMMs of `multi` run on all rows, in memory that is free then.
  Status multiply_rows(const uint8_t*& x) const {
    x = buffers_.rows(Buffer::kX);
    for (size_t i = 0; i < model_.multi.size(); ++i) {
      uint8_t* const y = buffers_.multi_rows(int(i % 2));
      int none = 0;
      EMBERT_TRY(model_.multi[i]->run({x}, {}, plan_.rows, y, nullptr, none, stream_));
      if (i == 0 && config_.task_heads.token_norm) EMBERT_TRY(normalize(y, model_.weights.heads().multi_norm));
      x = y;
    }
    return {};
  }

  // The requested rows are gathered at the end.
  Status project_tokens() const {
    const uint8_t* x = nullptr;
    EMBERT_TRY(multiply_rows(x));
    const TaskOutput& scores = output_of(Task::kClassify);
    if (scores.spans != nullptr)
      EMBERT_TRY(max_sims(config_.dtype, x, config_.task_heads.multi_columns(), scores.spans, scores.rows,
                          scores.columns, scores.out, stream_));
    if (!plan_.outputs.requests(bit(Task::kMulti))) return {};
    return store_tokens(Task::kMulti, x, !config_.task_heads.token_logits);
  }

  Status store_tokens(Task task, const void* rows, bool unit_length) const {
    const TaskOutput& output = output_of(task);
    return token_rows(config_.dtype, rows, output.chosen, output.rows, output.columns, unit_length, output.out,
                      stream_);
  }

  const DeviceModel& model_;
  const EncoderConfig& config_;
  const Activations& buffers_;
  const BatchPlan& plan_;
  const LastRows& rows_;
  const Stream& stream_;
};

}  // namespace

Status run_heads(const DeviceModel& model, const BatchPlan& plan, const LastRows& rows, const Stream& stream) {
  return Heads(model, plan, rows, stream).run();
}

Status run_decider_head(const DeviceModel& decider, int marker, const BatchPlan& plan, const LastRows& rows,
                        const Stream& stream) {
  return Heads(decider, plan, rows, stream).decide(marker);
}

}  // namespace embert
