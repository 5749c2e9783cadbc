// `start`: the weights are there; an encoder becomes ready for batches.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/encoder.h"

namespace embert {

Status Encoder::start(std::string& fold_refusal) {
  EMBERT_CUDA(cudaSetDevice(options_.device));
  EMBERT_CUDA(cudaStreamSynchronize(stream_.handle));
  EMBERT_TRY(weights_.complete());
  EMBERT_TRY(prepare_products());
  if (folds_) {
    const Status folded = gemm_->check_folds();
    if (folded.is_lost()) return folded;
    fold_refusal = folded.message();
    if (!folded.ok()) return {};
  }
  EMBERT_TRY(warm_up(fold_refusal));
  if (!fold_refusal.empty()) return {};
  EMBERT_TRY(warm_up_heads());
  return options_.graphs == 0 ? Status() : capture_graphs();
}

Status Encoder::prepare_products() {
  gamma_in_rows_ = folds_ && weights_.has_what_is_stored();
  products_.resize(shape_.layers);
  for (int i = 0; i < shape_.layers; ++i) EMBERT_TRY(prepare_layer(i));
  EMBERT_TRY(prepare_multi_vectors());
  if (splade_ != nullptr)
    EMBERT_TRY(splade_->prepare(*gemm_, weights_.tables().word, row_capacity_, sequence_capacity_, stream_));
  EMBERT_CUDA(cudaStreamSynchronize(stream_.handle));
  weights_.forget_exact();
  return {};
}

Status Encoder::prepare_layer(int i) {
  const LayerWeights& w = weights_.layer(i);
  LayerProducts& p = products_[i];
  const int hidden = shape_.hidden, inner = shape_.inner;
  const float epsilon = shape_.epsilon;
  // The LayerNorms before the layer and inside it, where the products apply them.
  Norm before, inside;
  if (folds_) {
    before = i == 0 ? weights_.tables().norm : weights_.layer(i - 1).out_norm;
    inside = w.attention_norm;
  }
  LinearWeights qkv{w.qkv_weight, w.qkv_bias, 3 * hidden, hidden, Activation::kNone, before, {}, epsilon};
  LinearWeights attention_out{
      w.attention_weight, w.attention_bias, hidden, hidden, Activation::kNone, {}, before, epsilon};
  LinearWeights wide{w.inner_weight, w.inner_bias, inner, hidden, shape_.activation, inside, {}, epsilon};
  LinearWeights out{w.out_weight, w.out_bias, hidden, inner, Activation::kNone, {}, inside, epsilon};
  if (gamma_in_rows_) {
    for (LinearWeights* each : {&qkv, &attention_out, &wide, &out}) each->gamma_in_rows = true;
    attention_out.next_gamma = inside.gamma;
    if (i + 1 < shape_.layers) out.next_gamma = w.out_norm.gamma;  // no product reads the last layer's rows
  } else if (folds_) {
    qkv.exact = weights_.exact_qkv(i);
    wide.exact = weights_.exact_inner(i);
  }
  // Each product fetches the weights of the product after the next. The next batch's first ones follow the last
  // layer's.
  const LayerWeights& after = weights_.layer((i + 1) % shape_.layers);
  const size_t element = bytes_of(shape_.dtype);
  qkv.ahead = w.inner_weight, qkv.ahead_bytes = size_t(inner) * hidden * element;
  attention_out.ahead = w.out_weight, attention_out.ahead_bytes = size_t(inner) * hidden * element;
  wide.ahead = after.qkv_weight, wide.ahead_bytes = size_t(3 * hidden) * hidden * element;
  out.ahead = after.attention_weight, out.ahead_bytes = size_t(hidden) * hidden * element;
  EMBERT_TRY(gemm_->prepare(qkv, stream_, p.qkv));
  EMBERT_TRY(gemm_->prepare(attention_out, stream_, p.attention_out));
  std::unique_ptr<Linear> first, second;
  EMBERT_TRY(gemm_->prepare(wide, stream_, first));
  EMBERT_TRY(gemm_->prepare(out, stream_, second));
  return gemm_->join(std::move(first), std::move(second), p.feed_forward);
}

Status Encoder::prepare_multi_vectors() {
  for (const ProductWeights& layer : weights_.heads().multi()) {
    LinearWeights product;
    product.weight = layer.weight;
    product.bias = layer.bias;
    product.out = layer.shape.out;
    product.in = layer.shape.in;
    product.activation = layer.shape.activation == HeadActivation::kRelu       ? Activation::kRelu
                         : layer.shape.activation == HeadActivation::kGelu     ? Activation::kGeluErf
                         : layer.shape.activation == HeadActivation::kGeluTanh ? Activation::kGeluTanh
                                                                               : Activation::kNone;
    multi_.emplace_back();
    EMBERT_TRY(gemm_->prepare(product, stream_, multi_.back()));
  }
  return {};
}

// A batch of as many texts of full length as fit, of tokens from all over the vocabulary.
struct Encoder::FullBatch {
  std::vector<int32_t> ids, cu_seqlens;
  std::vector<Tasks> tasks;
  BatchView view;

  FullBatch(const ModelShape& shape, int max_tokens, Tasks wanted) {
    const int length = std::min(shape.max_length(), max_tokens), sequences = std::max(1, max_tokens / length);
    ids.resize(size_t(sequences) * length);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = int32_t(i * shape.vocabulary / ids.size());
    for (int i = 0; i <= sequences; ++i) cu_seqlens.push_back(i * length);
    tasks.assign(sequences, wanted);
    view.tokens = sequences * length;
    view.sequences = sequences;
    view.ids = ids.data();
    view.cu_seqlens = cu_seqlens.data();
    view.tasks = tasks.data();
  }
};

// Full batches in every slot, so that all kernels are loaded before the first request. The tokens come from all over
// the vocabulary: the first batch's rows decide whether LayerNorms can be folded.
Status Encoder::warm_up(std::string& fold_refusal) {
  const FullBatch batch(shape_, options_.max_tokens, bit(Task::kEmbed));
  std::vector<Answer> answers;
  if (folds_) {
    EMBERT_TRY(largest_offset_.allocate(sizeof(float)));
    EMBERT_CUDA(cudaMemsetAsync(largest_offset_.as(), 0, sizeof(float), stream_.handle));
  }
  for (int round = 0; round < kSlots; ++round) {
    int64_t ticket = 0;
    EMBERT_TRY(submit(batch.view, ticket));
    EMBERT_TRY(wait(ticket, answers));
    if (largest_offset_.bytes() > 0) EMBERT_TRY(check_offset(fold_refusal));
    if (!fold_refusal.empty()) return {};
  }
  return {};
}

// The same for the heads that the batches above have not run, with both slots' memory for their answers. What TOKENS
// need is taken when they are first asked for.
Status Encoder::warm_up_heads() {
  const Tasks heads = shape_.task_heads.tasks() & ~bit(Task::kTokens);
  if (heads == bit(Task::kEmbed)) return {};
  const FullBatch batch(shape_, options_.max_tokens, heads);
  std::vector<Answer> answers;
  std::array<int64_t, kSlots> tickets{};
  for (int64_t& ticket : tickets) EMBERT_TRY(submit(batch.view, ticket));
  for (const int64_t ticket : tickets) EMBERT_TRY(wait(ticket, answers));
  return {};
}

Status Encoder::check_offset(std::string& fold_refusal) {
  float largest = 0.0f;
  EMBERT_CUDA(cudaMemcpy(&largest, largest_offset_.as(), sizeof(largest), cudaMemcpyDeviceToHost));
  largest_offset_.release();
  const std::string refusal = "LayerNorm cannot be folded into the products: a row before it ";
  if (std::isinf(largest)) {
    // With gamma in the rows, gamma times a row may leave the type's range where the row does not. If the model itself
    // does, it also does without folding, and its requests fail.
    fold_refusal = refusal + "is not finite";
  } else if (largest > kMostOffset) {
    fold_refusal = refusal + "has a mean of " + std::to_string(largest) + " deviations, at most " +
                   std::to_string(int(kMostOffset)) + " is taken";
  }
  return {};
}

}  // namespace embert
