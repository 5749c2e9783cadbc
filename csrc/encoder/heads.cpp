// The end of a forward pass: from the last layer's rows to the requested tasks, each head for the sequences that
// request it. Heads that read rows before their LayerNorm come first, because the others normalize the rows in place.

#include "heads/heads.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "encoder/encoder.h"
#include "ops/norm.h"

namespace embert {

// buffers_.shared is free after the last layer. Its halves hold the rows between a head's linear layers.
float* Encoder::layer_scratch(int half) const {
  return reinterpret_cast<float*>(buffers_.shared) +
         half * size_t(sequence_capacity_) * model_.task_heads.widest(model_.hidden);
}

Status Encoder::run_heads(const Plan& plan, const RowView& x, bool gathered, const Stream& stream) {
  const TaskOutputs& outputs = plan.outputs;
  if (outputs.requests(bit(Task::kEmbed))) EMBERT_TRY(embed_head(plan, x, gathered, stream));
  if (outputs.requests(bit(Task::kClassify))) EMBERT_TRY(classification_head(plan, x, gathered, stream));
  const bool pairs = splade_ != nullptr && outputs.requests(bit(Task::kSparse));
  if (outputs.requests(bit(Task::kSparse)) && !pairs) {
    const TaskOutput& output = outputs.task_output(Task::kSparse);
    const HeadWeights& weights = weights_.heads();
    EMBERT_TRY(token_weights(model_.dtype, x, last_norm(), model_.epsilon, output.chosen, output.rows, model_.hidden,
                             weights.token_weight(), weights.token_bias(), output.out, stream));
  }
  if (!outputs.requests(bit(Task::kTokens) | bit(Task::kMulti)) && !pairs) return {};
  if (program_.last.exists()) {
    EMBERT_TRY(
        layernorm(model_.dtype, buffers_.x, last_norm(), plan.rows, model_.hidden, model_.epsilon, buffers_.x, stream));
  }
  if (pairs) EMBERT_TRY(splade_head(plan, stream));
  if (outputs.requests(bit(Task::kMulti))) EMBERT_TRY(multi_vector_head(plan, stream));
  if (!outputs.requests(bit(Task::kTokens))) return {};
  const TaskOutput& output = outputs.task_output(Task::kTokens);
  return token_rows(model_.dtype, buffers_.x, output.chosen, output.rows, output.columns, false, output.out, stream);
}

Status Encoder::embed_head(const Plan& plan, const RowView& x, bool gathered, const Stream& stream) {
  const TaskOutput& output = plan.outputs.task_output(Task::kEmbed);
  const OffsetsOutput& offsets = buffers_.offsets;
  const std::vector<DenseLayer>& layers = weights_.heads().dense();
  const auto pooled = [&](const uint32_t* cuts, float* to) {
    return pool(model_.dtype, model_.pooling, x, gathered, last_norm(), model_.epsilon, offsets.cu_seqlens, cuts,
                output.chosen, output.rows, plan.longest, model_.hidden, to, stream);
  };
  if (layers.empty()) return pooled(offsets.cuts, output.out);
  float *from = layer_scratch(0), *to = layer_scratch(1);
  EMBERT_TRY(pooled(nullptr, from));
  for (size_t i = 0; i < layers.size(); ++i) {
    const int out = layers[i].shape.out, pitch = i + 1 < layers.size() ? dense_pitch(out) : out;
    EMBERT_TRY(dense(from, output.rows, layers[i], to, pitch, stream));
    std::swap(from, to);
  }
  return cut_rows(from, offsets.cuts, output.chosen, output.rows, output.columns, output.out, stream);
}

// Its GEMMs run on all rows, in memory that is free then; the requested rows are gathered at the end.
Status Encoder::multi_vector_head(const Plan& plan, const Stream& stream) {
  const TaskOutput& output = plan.outputs.task_output(Task::kMulti);
  const size_t half = size_t(row_capacity_) * model_.task_heads.multi_scratch_columns() / 2 * bytes_of(model_.dtype);
  const uint8_t* x = buffers_.x;
  for (size_t i = 0; i < multi_.size(); ++i) {
    uint8_t* const y = buffers_.shared + i % 2 * half;
    int none = 0;
    EMBERT_TRY(multi_[i]->run({x}, {}, plan.rows, y, nullptr, none, stream));
    if (i == 0 && model_.task_heads.token_norm) {
      EMBERT_TRY(layernorm(model_.dtype, y, weights_.heads().multi_norm(), plan.rows, model_.hidden, model_.epsilon, y,
                           stream));
    }
    x = y;
  }
  const bool unit_length = !model_.task_heads.token_logits;
  return token_rows(model_.dtype, x, output.chosen, output.rows, output.columns, unit_length, output.out, stream);
}

Status Encoder::classification_head(const Plan& plan, const RowView& x, bool gathered, const Stream& stream) {
  const TaskOutput& output = plan.outputs.task_output(Task::kClassify);
  const std::vector<DenseLayer>& layers = weights_.heads().classifier();
  float *from = layer_scratch(0), *to = layer_scratch(1);
  EMBERT_TRY(pool(model_.dtype, model_.classifier_pooling, x, gathered, last_norm(), model_.epsilon,
                  buffers_.offsets.cu_seqlens, nullptr, output.chosen, output.rows, plan.longest, model_.hidden, from,
                  stream));
  for (size_t i = 0; i < layers.size(); ++i) {
    const bool is_last = i + 1 == layers.size();
    const int out = layers[i].shape.out;
    EMBERT_TRY(
        dense(from, output.rows, layers[i], is_last ? output.out : to, is_last ? out : dense_pitch(out), stream));
    std::swap(from, to);
  }
  return {};
}

// Its rows are transformed in buffers_.sum, which is free after the last layer.
Status Encoder::splade_head(const Plan& plan, const Stream& stream) {
  const TaskOutput& output = plan.outputs.task_output(Task::kSparse);
  const SpladeBatch batch{
      buffers_.x,      buffers_.sum,         plan.rows, output.sequences, buffers_.offsets.cu_seqlens, output.chosen,
      plan.cu_seqlens, output.chosen_on_host};
  return splade_->run(batch, *plan.pairs, stream);
}

namespace {

// Some sequences of a batch that a slot's memory holds, as a batch of its own that requests SPARSE.
class RepeatedBatch {
 public:
  RepeatedBatch(const InputLayout& layout, const uint8_t* input, const int* positions)
      : lengths_(numbers(input + layout.lengths, layout.sequences)),
        ids_(numbers(input + layout.ids, layout.tokens)),
        types_(numbers(input + layout.types, layout.tokens)) {
    if (positions != nullptr) positions_.assign(positions, positions + layout.tokens);
    starts_.assign(1, 0);
    for (const int32_t length : lengths_) starts_.push_back(starts_.back() + length);
  }

  BatchView batch_of(const std::vector<int>& sequences) {
    batch_ = {};
    for (const int sequence : sequences) {
      const auto append = [&](const std::vector<int32_t>& from, std::vector<int32_t>& to) {
        if (!from.empty()) to.insert(to.end(), from.begin() + starts_[sequence], from.begin() + starts_[sequence + 1]);
      };
      append(ids_, batch_.ids);
      append(types_, batch_.types);
      append(positions_, batch_.positions);
      batch_.cu_seqlens.push_back(int32_t(batch_.ids.size()));
    }
    batch_.tasks.assign(sequences.size(), bit(Task::kSparse));
    BatchView view;
    view.tokens = int(batch_.ids.size());
    view.sequences = int(sequences.size());
    view.ids = batch_.ids.data();
    view.cu_seqlens = batch_.cu_seqlens.data();
    view.types = batch_.types.data();
    view.positions = positions_.empty() ? nullptr : batch_.positions.data();
    view.tasks = batch_.tasks.data();
    return view;
  }

 private:
  static std::vector<int32_t> numbers(const uint8_t* from, int count) {
    const auto* const first = reinterpret_cast<const int32_t*>(from);
    return {first, first + count};
  }

  std::vector<int32_t> lengths_, ids_, types_, positions_, starts_;
  struct {
    std::vector<int32_t> ids, types, positions, cu_seqlens{0};
    std::vector<Tasks> tasks;
  } batch_;
};

}  // namespace

Status Encoder::collect_pairs(Slot& slot, Answer& answer) {
  const TaskOutput& output = slot.outputs.task_output(Task::kSparse);
  std::vector<int> sequences, counts(slot.pairs.counts(), slot.pairs.counts() + output.sequences);
  for (int i = 0; i < output.sequences; ++i)
    sequences.push_back(output.chosen_on_host == nullptr ? i : output.chosen_on_host[i]);
  int done = slot.pairs.complete(output.sequences);
  EMBERT_TRY(append_pairs(slot.pairs, done, 0, answer));
  if (done == answer.sequences) return {};
  RepeatedBatch repeated(InputLayout(slot.tokens, slot.sequences), slot.input.as(),
                         slot.has_positions ? slot.positions.as<int>() : nullptr);
  while (done < answer.sequences) {
    int end = done;
    for (int64_t pairs = 0; end < answer.sequences; ++end) {
      pairs += counts[end];
      if (pairs > slot.pairs.capacity() && end > done) break;
    }
    const BatchView batch = repeated.batch_of({sequences.begin() + done, sequences.begin() + end});
    EMBERT_TRY(run_again(slot, batch));
    const int complete = slot.pairs.complete(batch.sequences);
    EMBERT_TRY(append_pairs(slot.pairs, complete, done, answer));
    done += complete;
  }
  return {};
}

}  // namespace embert
