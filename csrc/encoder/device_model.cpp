#include "encoder/device_model.h"

#include <algorithm>
#include <utility>

namespace embert {
namespace {

Status make_provider(const EncoderConfig& model, const EncoderOptions& options, bool is_hopper, const Build& build,
                     std::unique_ptr<GemmProvider>& provider) {
  const std::string& requested = options.gemm;
  const bool own = is_hopper && model.dtype != DType::kFloat32;
  if (requested == "hopper" && !own)
    return Status::refused("the hopper GEMM needs compute capability 9.0 and a 16-bit type");
  if (own && requested != "cublaslt" && !build.hopper) return missing_sm90a(build);
  if (model.int8 && (!own || requested == "cublaslt"))
    return Status::refused(
        "int8 needs a GPU of compute capability 9.0 and the encoder's own matrix products, which cuda-portable does "
        "not use: choose the dtype float16");
  if (requested == "hopper" || (requested == "auto" && own)) return make_sm90(model.dtype, provider);
  if (requested == "cublaslt" || requested == "auto")
    return make_cublaslt(model.dtype, options.cublaslt_library, provider);
  return Status::refused("no GEMM is called ", requested);
}

Activation activation_of(HeadActivation activation) {
  switch (activation) {
    case HeadActivation::kRelu:
      return Activation::kRelu;
    case HeadActivation::kGelu:
      return Activation::kGeluErf;
    case HeadActivation::kGeluTanh:
      return Activation::kGeluTanh;
    default:
      return Activation::kNone;
  }
}

// The weights of the program's GEMM i. `rope` must live until the GEMM is prepared.
LinearWeights linear_weights(const DeviceModel& model, size_t i, RopeColumns& rope) {
  const EncoderConfig& config = model.config;
  const Weights& stored = model.weights;
  const std::vector<GemmPlan>& plans = model.program.gemms;
  const GemmPlan& plan = plans[i];
  const MatrixWeights source = stored.matrix(plan.matrix, plan.layer);
  LinearWeights weights;
  weights.weight = source.weight;
  weights.bias = source.bias;
  weights.n = plan.gates ? source.out / 2 : source.out;
  weights.k = source.in;
  weights.gated = plan.gates;
  if (plan.matrix == Matrix::kInputGate || (plan.matrix == Matrix::kInner && (plan.gates || !config.gated)))
    weights.activation = config.activation;
  weights.input_norm = stored.input_norm(plan);
  weights.residual_norm = stored.norm(plan.residual);
  weights.epsilon = config.epsilon;
  weights.rms = config.rms_norm;
  weights.prescaled_rows = stored.prescales_rows();
  if (weights.prescaled_rows) {
    weights.next_gamma = stored.norm(plan.next).gamma;
    if (config.pre_norm) weights.residual_norm.gamma = stored.norm(plan.before).gamma;
  } else if (plan.input.exists()) {
    weights.exact = source.exact;
  }
  if (source.scales != nullptr) {
    weights.scales = source.scales;
    weights.quantized = model.activations.quantized();
    if (plan.matrix == Matrix::kOut) weights.block = kInnerBlock;
    if (plan.matrix == Matrix::kAttentionOut && config.head_size() == kHeadBlock) weights.block = kHeadBlock;
  }
  if (plan.rope) {
    rope = model.rope_columns(plan.layer);
    weights.rope = &rope;
  }
  // Each GEMM of the layers prefetches the weights of the GEMM after the next. The first ones of the next batch follow
  // those of the last layer.
  const size_t first = config.embedding > 0 ? 1 : 0, count = plans.size() - first;
  if (i >= first) {
    const GemmPlan& later = plans[first + (i - first + 2) % count];
    const MatrixWeights prefetched = stored.matrix(later.matrix, later.layer);
    weights.prefetch_weights = prefetched.weight;
    weights.prefetch_bytes = size_t(prefetched.out) * prefetched.in * bytes_of(config.dtype);
  }
  return weights;
}

}  // namespace

Status DeviceModel::create(const EncoderOptions& options, bool is_hopper, const Build& build, Stream& stream) {
  EMBERT_TRY(weights.allocate());
  if (config.task_heads.splade)
    splade = std::make_unique<SpladeHead>(
        SpladeShape{*config.task_heads.splade, config.hidden, config.vocabulary, config.dtype});
  EMBERT_TRY(make_provider(config, options, is_hopper, build, provider));
  stream.dependent_launch = provider->dependent_launch();
  if (is_hopper && config.dtype != DType::kFloat32 && options.gemm != "cublaslt") {
    maps = std::make_unique<TensorMaps>(config.dtype);
    EMBERT_TRY(maps->open());
  }
  // Layers that share weights cannot fold different LayerNorms into them.
  const bool can_fold = config.int8 ? provider->has_int8() : provider->folds();  // int8 GEMMs always fold
  folds = options.fold && can_fold && config.hidden <= kMaxStatColumns && config.shared.empty();
  if (config.int8 && !folds)
    return Status::refused("matrices in int8 need LayerNorms in their products, and ", provider->name(),
                           (can_fold ? " was asked for without" : " has no products in int8"));
  program = compile(config, {folds, provider->fuses_rope(), provider->fuses_gate(), provider->groups_experts()});
  if (folds && !config.int8) weights.keep_exact();
  return {};
}

Status DeviceModel::allocate_activations(int max_tokens, DeviceModel* decider, const Stream& stream) {
  if (decider == nullptr) return activations.allocate(config, program, max_tokens, folds, 0, stream);
  const int widest = std::max(decider->program.widest, decider->config.task_heads.multi_scratch_columns());
  EMBERT_TRY(activations.allocate(config, program, max_tokens, folds || decider->folds, widest, stream));
  decider->activations = activations.of(decider->program);
  return {};
}

Status DeviceModel::prepare(const Stream& stream) {
  if (weights.prescales_rows() && config.pre_norm) EMBERT_TRY(weights.split_gammas(stream));
  gemms.resize(program.gemms.size());
  for (size_t i = 0; i < gemms.size(); ++i) {
    RopeColumns rope;
    std::unique_ptr<Linear> linear;
    EMBERT_TRY(provider->prepare(linear_weights(*this, i, rope), stream, linear));
    if (i > 0 && program.gemms[i - 1].fuses_next) {
      EMBERT_TRY(provider->fuse(std::move(gemms[i - 1].linear), std::move(linear), gemms[i - 1].fused));
    } else {
      gemms[i].linear = std::move(linear);
    }
  }
  experts.resize(config.layers);
  for (const int i : config.expert_layers) {
    const LayerWeights& w = weights.layer(i);
    const ExpertWeights matrices{w.experts_inner, w.experts_out, config.experts,
                                 config.hidden,   config.inner,  config.activation};
    EMBERT_TRY(provider->groups_experts() ? provider->prepare_experts(matrices, stream, experts[i])
                                          : make_dense_experts(*provider, config.dtype, matrices, stream, experts[i]));
  }
  for (const HeadGemmWeights& layer : weights.heads().multi) {
    LinearWeights product;
    product.weight = layer.weight;
    product.bias = layer.bias;
    product.n = layer.shape.out;
    product.k = layer.shape.in;
    product.activation = activation_of(layer.shape.activation);
    EMBERT_TRY(provider->prepare(product, stream, multi.emplace_back()));
  }
  if (splade != nullptr)
    EMBERT_TRY(splade->prepare(*provider, weights.heads().splade, activations.row_capacity(),
                               activations.sequence_capacity(), stream));
  EMBERT_CUDA(cudaStreamSynchronize(stream.handle));
  weights.forget_exact();
  return {};
}

RopeColumns DeviceModel::rope_columns(int layer) const {
  const LayerAttention attention = config.attention_of(layer);
  const AttentionHeads heads = config.attention_heads(layer);
  return {heads.head_size, attention.rotary_dim, heads.columns() + heads.key_columns(),
          attention.rotary_dim == 0 ? nullptr : weights.angles(attention.table), activations.offsets().positions};
}

}  // namespace embert
