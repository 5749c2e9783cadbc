// The end of a forward: from the last layer's rows to what the sequences want of them, each head for those that want
// it. Heads that read rows before their LayerNorm come first, because the others normalise the rows in place.

#include <utility>

#include "heads/dense.h"
#include "heads/pooling.h"
#include "heads/token_heads.h"
#include "norm/layernorm.h"
#include "runtime/encoder.h"

namespace embert {

// at_.wide is free after the last layer. The rows between a head's linear layers lie in its halves.
float* Encoder::between_layers(int half) const {
  return reinterpret_cast<float*>(at_.wide) +
         half * size_t(sequence_capacity_) * shape_.task_heads.widest(shape_.hidden);
}

Status Encoder::run_heads(const Plan& plan, const Rows& x, bool gathered, const Stream& stream) {
  const Parts& parts = plan.parts;
  if (parts.wants(bit(Task::kEmbed))) EMBERT_TRY(embed_head(plan, x, gathered, stream));
  if (parts.wants(bit(Task::kClassify))) EMBERT_TRY(classification_head(plan, x, gathered, stream));
  // A head over the vocabulary (SPLADE) has its place here, too: its answer has rows, offsets and indices.
  if (parts.wants(bit(Task::kSparse))) {
    const Part& part = parts.of(Task::kSparse);
    const HeadWeights& weights = weights_.heads();
    EMBERT_TRY(token_weights(shape_.dtype, x, last_norm(), shape_.epsilon, part.chosen, part.rows, shape_.hidden,
                             weights.token_weight(), weights.token_bias(), part.out, stream));
  }
  if (!parts.wants(bit(Task::kTokens) | bit(Task::kMulti))) return {};
  if (folds_) {
    EMBERT_TRY(layernorm(shape_.dtype, at_.x, weights_.layer(shape_.layers - 1).out_norm, plan.rows, shape_.hidden,
                         shape_.epsilon, at_.x, stream));
  }
  if (parts.wants(bit(Task::kMulti))) EMBERT_TRY(multi_vector_head(plan, stream));
  if (!parts.wants(bit(Task::kTokens))) return {};
  const Part& part = parts.of(Task::kTokens);
  return token_rows(shape_.dtype, at_.x, part.chosen, part.rows, part.columns, false, part.out, stream);
}

Status Encoder::embed_head(const Plan& plan, const Rows& x, bool gathered, const Stream& stream) {
  const Part& part = plan.parts.of(Task::kEmbed);
  const OffsetsOutput& offsets = at_.offsets;
  const std::vector<DenseLayer>& layers = weights_.heads().dense();
  const auto pooled = [&](const uint32_t* cuts, float* to) {
    return pool(shape_.dtype, shape_.pooling, x, gathered, last_norm(), shape_.epsilon, offsets.cu_seqlens, cuts,
                part.chosen, part.rows, plan.longest, shape_.hidden, to, stream);
  };
  if (layers.empty()) return pooled(offsets.cuts, part.out);
  float *from = between_layers(0), *to = between_layers(1);
  EMBERT_TRY(pooled(nullptr, from));
  for (size_t i = 0; i < layers.size(); ++i) {
    const int out = layers[i].shape.out, pitch = i + 1 < layers.size() ? dense_pitch(out) : out;
    EMBERT_TRY(dense(from, part.rows, layers[i], to, pitch, stream));
    std::swap(from, to);
  }
  return cut_rows(from, offsets.cuts, part.chosen, part.rows, part.columns, part.out, stream);
}

// Its products run on all rows, in memory that is free then; the wanted rows are brought together at the end.
Status Encoder::multi_vector_head(const Plan& plan, const Stream& stream) {
  const Part& part = plan.parts.of(Task::kMulti);
  const size_t half = size_t(row_capacity_) * shape_.task_heads.multi_room() / 2 * bytes_of(shape_.dtype);
  const uint8_t* x = at_.x;
  for (size_t i = 0; i < multi_.size(); ++i) {
    uint8_t* const y = at_.wide + i % 2 * half;
    int none = 0;
    EMBERT_TRY(multi_[i]->run({x}, {}, plan.rows, y, nullptr, none, stream));
    x = y;
  }
  return token_rows(shape_.dtype, x, part.chosen, part.rows, part.columns, true, part.out, stream);
}

Status Encoder::classification_head(const Plan& plan, const Rows& x, bool gathered, const Stream& stream) {
  const Part& part = plan.parts.of(Task::kClassify);
  const std::vector<DenseLayer>& layers = weights_.heads().classifier();
  float *from = between_layers(0), *to = between_layers(1);
  EMBERT_TRY(pool(shape_.dtype, Pooling::kCls, x, gathered, last_norm(), shape_.epsilon, at_.offsets.cu_seqlens,
                  nullptr, part.chosen, part.rows, plan.longest, shape_.hidden, from, stream));
  for (size_t i = 0; i < layers.size(); ++i) {
    const bool is_last = i + 1 == layers.size();
    const int out = layers[i].shape.out;
    EMBERT_TRY(dense(from, part.rows, layers[i], is_last ? part.out : to, is_last ? out : dense_pitch(out), stream));
    std::swap(from, to);
  }
  return {};
}

}  // namespace embert
