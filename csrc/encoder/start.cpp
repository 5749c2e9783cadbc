// `start`: all weights are loaded; prepares an encoder for batches.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "encoder/encoder.h"

namespace embert {

Status Encoder::start(std::string& fold_refusal) {
  EMBERT_CUDA(cudaSetDevice(options_.device));
  EMBERT_CUDA(cudaStreamSynchronize(stream_.handle));
  EMBERT_TRY(weights_.complete());
  EMBERT_TRY(prepare_gemms());
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

Status Encoder::prepare_gemms() {
  // Rows of pre-norm models are the residual, too. They are divided by the gamma again, which needs no μ: RMSNorms
  // only. Not with int8: quantizing the rows applies their LayerNorms.
  prescaled_rows_ = folds_ && (!model_.pre_norm || model_.rms_norm) && !model_.int8 && weights_.is_exact();
  if (prescaled_rows_ && model_.pre_norm) EMBERT_TRY(weights_.split_gammas(stream_));
  gemms_.resize(program_.gemms.size());
  for (size_t i = 0; i < gemms_.size(); ++i) {
    std::unique_ptr<Linear> linear;
    EMBERT_TRY(prepare_gemm(i, linear));
    if (i > 0 && program_.gemms[i - 1].fuses_next) {
      EMBERT_TRY(gemm_->fuse(std::move(gemms_[i - 1].linear), std::move(linear), gemms_[i - 1].fused));
    } else {
      gemms_[i].linear = std::move(linear);
    }
  }
  EMBERT_TRY(prepare_multi_vectors());
  if (splade_ != nullptr)
    EMBERT_TRY(splade_->prepare(*gemm_, weights_.tables().word, row_capacity_, sequence_capacity_, stream_));
  EMBERT_CUDA(cudaStreamSynchronize(stream_.handle));
  weights_.forget_exact();
  return {};
}

Status Encoder::prepare_gemm(size_t i, std::unique_ptr<Linear>& linear) {
  const GemmPlan& plan = program_.gemms[i];
  const MatrixWeights source = weights_.matrix(plan.matrix, plan.layer);
  LinearWeights weights;
  weights.weight = source.weight;
  weights.bias = source.bias;
  weights.n = source.out;
  weights.k = source.in;
  if (plan.matrix == Matrix::kInner && (plan.gates || !model_.gated)) weights.activation = model_.activation;
  if (plan.gates) {
    weights.gated = true;
    weights.n = source.out / 2;
  }
  weights.input_norm = weights_.input_norm(plan);
  weights.residual_norm = weights_.norm(plan.residual);
  weights.epsilon = model_.epsilon;
  weights.rms = model_.rms_norm;
  weights.prescaled_rows = prescaled_rows_;
  if (prescaled_rows_) {
    weights.next_gamma = weights_.norm(plan.next).gamma;
    if (model_.pre_norm) weights.residual_norm.gamma = weights_.norm(plan.before).gamma;
  } else if (plan.input.exists()) {
    weights.exact = source.exact;
  }
  if (source.scales != nullptr) {
    weights.scales = source.scales;
    weights.quantized = buffers_.quantized;
    if (plan.matrix == Matrix::kOut) weights.block = kInnerBlock;
    if (plan.matrix == Matrix::kAttentionOut && model_.head_size() == kHeadBlock) weights.block = kHeadBlock;
  }
  RopeColumns rope;
  if (plan.rope) {
    rope = rope_columns(plan.layer);
    weights.rope = &rope;
  }
  // Each GEMM of the layers prefetches the weights of the GEMM after the next. The first ones of the next batch follow
  // those of the last layer.
  const size_t first = model_.embedding > 0 ? 1 : 0, count = program_.gemms.size() - first;
  if (i >= first) {
    const GemmPlan& later = program_.gemms[first + (i - first + 2) % count];
    const MatrixWeights its = weights_.matrix(later.matrix, later.layer);
    weights.prefetch_weights = its.weight;
    weights.prefetch_bytes = size_t(its.out) * its.in * bytes_of(model_.dtype);
  }
  return gemm_->prepare(weights, stream_, linear);
}

Status Encoder::prepare_multi_vectors() {
  for (const HeadGemmWeights& layer : weights_.heads().multi()) {
    LinearWeights product;
    product.weight = layer.weight;
    product.bias = layer.bias;
    product.n = layer.shape.out;
    product.k = layer.shape.in;
    product.activation = layer.shape.activation == HeadActivation::kRelu       ? Activation::kRelu
                         : layer.shape.activation == HeadActivation::kGelu     ? Activation::kGeluErf
                         : layer.shape.activation == HeadActivation::kGeluTanh ? Activation::kGeluTanh
                                                                               : Activation::kNone;
    multi_.emplace_back();
    EMBERT_TRY(gemm_->prepare(product, stream_, multi_.back()));
  }
  return {};
}

// A batch of as many texts of full length as fit, with tokens from the whole vocabulary.
struct Encoder::FullBatch {
  std::vector<int32_t> ids, cu_seqlens;
  std::vector<Tasks> tasks;
  BatchView view;

  FullBatch(const EncoderConfig& model, int max_tokens, Tasks requested) {
    const int length = std::min(model.max_length(), max_tokens), sequences = std::max(1, max_tokens / length);
    ids.resize(size_t(sequences) * length);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = int32_t(i * model.vocabulary / ids.size());
    for (int i = 0; i <= sequences; ++i) cu_seqlens.push_back(i * length);
    tasks.assign(sequences, requested);
    view.tokens = sequences * length;
    view.sequences = sequences;
    view.ids = ids.data();
    view.cu_seqlens = cu_seqlens.data();
    view.tasks = tasks.data();
  }
};

// Full batches in every slot, so that all kernels are loaded before the first request. The tokens come from the whole
// vocabulary: the first batch's rows decide whether LayerNorms can be folded.
Status Encoder::warm_up(std::string& fold_refusal) {
  const FullBatch batch(model_, options_.max_tokens, bit(Task::kEmbed));
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

// The same for the heads that the batches above have not run, with both slots' memory for their answers. Memory for
// TOKENS is allocated when they are first requested.
Status Encoder::warm_up_heads() {
  const Tasks heads = model_.task_heads.tasks() & ~bit(Task::kTokens);
  if (heads == bit(Task::kEmbed)) return {};
  const FullBatch batch(model_, options_.max_tokens, heads);
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
    // With prescaled rows, gamma times a row may exceed the type's range where the row does not. If the model itself
    // exceeds it, it also does without folding, and its requests fail.
    fold_refusal = refusal + "is not finite";
  } else if (largest > kMaxOffset) {
    fold_refusal = refusal + "has a mean of " + std::to_string(largest) + " deviations, at most " +
                   std::to_string(int(kMaxOffset)) + " is taken";
  }
  return {};
}

}  // namespace embert
