// `start`: the weights are there; an encoder becomes ready for batches.

#include <algorithm>
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
  if (!fold_refusal.empty() || !options_.graphs) return {};
  return capture_graphs();
}

Status Encoder::prepare_products() {
  gamma_in_rows_ = folds_ && weights_.has_what_is_stored();
  products_.resize(shape_.layers);
  for (int i = 0; i < shape_.layers; ++i) EMBERT_TRY(prepare_layer(i));
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

// Full batches in every slot, so that all kernels are loaded before the first request. The tokens come from all over
// the vocabulary: the first batch's rows decide whether LayerNorms can be folded.
Status Encoder::warm_up(std::string& fold_refusal) {
  const int length = std::min(shape_.max_length(), options_.max_tokens);
  const int sequences = std::max(1, options_.max_tokens / length);
  std::vector<int32_t> ids(size_t(sequences) * length), cu_seqlens(sequences + 1);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = int32_t(i * shape_.vocabulary / ids.size());
  for (int i = 0; i <= sequences; ++i) cu_seqlens[i] = i * length;
  std::vector<float> out(size_t(sequences) * shape_.hidden);
  BatchView batch;
  batch.tokens = sequences * length;
  batch.sequences = sequences;
  batch.ids = ids.data();
  batch.cu_seqlens = cu_seqlens.data();
  if (folds_) {
    EMBERT_TRY(largest_offset_.allocate(sizeof(float)));
    EMBERT_CUDA(cudaMemsetAsync(largest_offset_.as(), 0, sizeof(float), stream_.handle));
  }
  for (int round = 0; round < kSlots; ++round) {
    int64_t ticket = 0;
    EMBERT_TRY(submit(batch, Task::kEmbed, ticket));
    EMBERT_TRY(wait(ticket, out.data()));
    if (largest_offset_.bytes() > 0) EMBERT_TRY(check_offset(fold_refusal));
    if (!fold_refusal.empty()) return {};
  }
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
