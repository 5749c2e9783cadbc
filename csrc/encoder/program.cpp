#include "encoder/program.h"

#include <algorithm>

namespace embert {
namespace {

class Compiler {
 public:
  Compiler(const EncoderConfig& model, const GemmCaps& caps) : model_(model), caps_(caps) {}

  Program compile() {
    embed();
    for (int i = 0; i < model_.layers; ++i) {
      attention(i);
      model_.has_experts(i) ? experts(i) : feed_forward(i);
      if (model_.layer_inputs > 0) layer_input(i);
    }
    program_.groups_experts = caps_.experts;
    if (!model_.pre_norm) {
      program_.last = pending_norm_;
    } else if (caps_.folds && !model_.rms_norm) {
      program_.last = {NormKind::kLast};
    } else {  // heads apply LayerNorms only
      normalize(Buffer::kX, Buffer::kX, {NormKind::kLast});
    }
    const bool unfused_gates = model_.gated && !caps_.gates;  // gates and their results
    program_.inner_from = unfused_gates ? 2 * model_.inner : 0;
    program_.widest =
        std::max({(unfused_gates ? 3 : 1) * model_.inner, model_.embedding_columns(), 2 * model_.layer_inputs});
    for (int i = 0; i < model_.layers; ++i)
      program_.context_from = std::max(program_.context_from, model_.qkv_columns(i));
    for (int i = 0; i < model_.layers; ++i)
      program_.widest = std::max(program_.widest, program_.context_from + model_.context_columns(i));
    return program_;
  }

 private:
  // The embedding's LayerNorm is applied by its readers where they support it: not before a projection, which would
  // have to fold it, and not where the normalized row is itself the residual. Without one, the first layer's norm may
  // be applied by its readers.
  void embed() {
    const bool projects = model_.embedding > 0, norms_later = caps_.folds && !projects && !model_.pre_norm;
    x_has_sums_ = caps_.folds && !model_.embedding_norm;
    Op step{OpKind::kEmbed};
    step.y = projects ? Buffer::kEmbedded : Buffer::kX;
    step.writes_stats = norms_later || x_has_sums_;
    step.next = outer_norm(0);
    program_.steps.push_back(step);
    if (norms_later) pending_norm_ = {NormKind::kEmbedding};
    if (projects) product({Matrix::kProjection}, Buffer::kEmbedded, Buffer::kX);
    if (model_.projects_first) normalize(Buffer::kX, Buffer::kX, {NormKind::kEmbedding});
  }

  void attention(int i) {
    const LayerAttention layer_attention = model_.attention_of(i);
    Buffer x = Buffer::kX;
    GemmPlan qkv{Matrix::kQkv, i, pending_norm_};
    if (model_.pre_norm && model_.has_attention_norm(i)) {
      if (x_has_sums_) {
        qkv.input = {NormKind::kAttention, i};
      } else {
        x = Buffer::kSum;
        normalize(Buffer::kX, x, {NormKind::kAttention, i});
      }
    }
    const bool rotates = layer_attention.rotary_dim > 0;
    const bool convolves = layer_attention.taps > 0, norms_heads = model_.qk_norm && !convolves;
    qkv.rope = rotates && caps_.rope && !norms_heads;  // norms of whole heads come before
    product(qkv, x, Buffer::kQkv);
    Op step{OpKind::kRope, Buffer::kQkv, Buffer::kQkv};
    step.layer = i;
    if (norms_heads || (rotates && !caps_.rope)) program_.steps.push_back(step);
    step.action = convolves ? OpKind::kConvolve : OpKind::kAttend;
    step.y = Buffer::kContext;
    step.gemm = int(program_.gemms.size());
    program_.steps.push_back(step);

    GemmPlan out{Matrix::kAttentionOut, i};
    if (model_.sublayer_norms) {
      product(out, Buffer::kContext, Buffer::kSum);
      add_normalized({NormKind::kAttentionSublayer, i}, outer_norm(i), inner_norm(i));
      return;
    }
    out.residual = pending_norm_;
    const bool routes = model_.has_experts(i);  // experts read normalized rows
    if (!routes) out.next = inner_norm(i);
    out.before = outer_norm(i);
    if (caps_.folds || !model_.pre_norm) {
      product(out, Buffer::kContext, Buffer::kSum, Buffer::kX, caps_.folds && !routes);
      if (!caps_.folds || routes) normalize(Buffer::kSum, Buffer::kX, inner_norm(i));
    } else {
      product(out, Buffer::kContext, Buffer::kX, Buffer::kX);
    }
  }

  void feed_forward(int i) {
    // Its rows: those of kSum, whose LayerNorm the GEMMs apply; or normalized ones. With norms after both parts kX
    // keeps the residual throughout.
    const Buffer rows = caps_.folds && !model_.sublayer_norms ? Buffer::kSum : Buffer::kX;
    Buffer x = rows, y = caps_.folds || model_.pre_norm ? Buffer::kX : Buffer::kSum;
    GemmPlan in{Matrix::kInner, i}, out{Matrix::kOut, i};
    if (caps_.folds) in.input = inner_norm(i);
    if (caps_.folds && !model_.pre_norm) {
      out.residual = inner_norm(i);
      out.next = i + 1 < model_.layers ? NormRef{NormKind::kOut, i} : NormRef{};  // no GEMM reads the last rows
    }
    if (model_.pre_norm && !model_.sublayer_norms) {
      out.before = inner_norm(i);
      out.next = outer_norm(i + 1);
    }
    if (!caps_.folds && model_.pre_norm) {
      x = Buffer::kSum;
      normalize(Buffer::kX, x, inner_norm(i));
    }
    in.gates = model_.gated && caps_.gates;
    if (!model_.gated && !model_.pre_norm) {  // the rows are the residual, too
      in.fuses_next = true;
      program_.gemms.push_back(in);
      program_.gemms.push_back(out);
      Op step{OpKind::kFeedForward, x, y};
      step.gemm = int(program_.gemms.size()) - 2;
      step.writes_stats = caps_.folds;
      program_.steps.push_back(step);
    } else {
      const bool unfused_gates = model_.gated && !caps_.gates;
      product(in, x, unfused_gates ? Buffer::kGates : Buffer::kInner);
      if (unfused_gates) program_.steps.push_back({OpKind::kGate, Buffer::kGates, Buffer::kInner});
      if (model_.sublayer_norms) {
        product(out, Buffer::kInner, Buffer::kSum);
        add_normalized({NormKind::kOutSublayer, i}, inner_norm(i), after_feed_forward(i));
      } else {
        product(out, Buffer::kInner, y, rows, caps_.folds);
      }
    }
    x_has_sums_ = caps_.folds;
    if (model_.pre_norm) return;
    pending_norm_ = caps_.folds ? NormRef{NormKind::kOut, i} : NormRef{};
    if (!caps_.folds) normalize(Buffer::kSum, Buffer::kX, {NormKind::kOut, i});
  }

  // What the layer's own input adds, gated by its rows as they are: no norm precedes it.
  void layer_input(int i) {
    product({Matrix::kInput, i}, Buffer::kEmbedded, Buffer::kInput);
    product({Matrix::kInputGate, i}, Buffer::kX, Buffer::kGated);
    Op step{OpKind::kTimesNormalized, Buffer::kInput, Buffer::kGated};
    step.norm = {NormKind::kInputs};
    program_.steps.push_back(step);
    product({Matrix::kInputDense, i}, Buffer::kGated, Buffer::kSum);
    add_normalized({NormKind::kInputSublayer, i}, {}, outer_norm(i + 1));
  }

  // The norm that readers of a layer's rows after the feed-forward layer apply.
  NormRef after_feed_forward(int i) const { return model_.layer_inputs > 0 ? NormRef{} : outer_norm(i + 1); }

  // Post-norm: kX holds normalized rows, before and after.
  void experts(int i) {
    Op step{OpKind::kExperts, Buffer::kX, Buffer::kX};
    step.layer = i;
    step.norm = {NormKind::kOut, i};
    program_.steps.push_back(step);
    pending_norm_ = {};
  }

  // The LayerNorm between attention and the feed-forward layer.
  NormRef inner_norm(int i) const { return {model_.pre_norm ? NormKind::kOut : NormKind::kAttention, i}; }

  // The norm before attention in pre-norm models; absent if the layer has none or does not exist.
  NormRef outer_norm(int i) const {
    const bool exists = model_.pre_norm && i < model_.layers && model_.has_attention_norm(i);
    return exists ? NormRef{NormKind::kAttention, i} : NormRef{};
  }

  void product(const GemmPlan& plan, Buffer x, Buffer y, Buffer residual = Buffer::kNothing,
               bool writes_stats = false) {
    Op step{OpKind::kGemm, x, y, residual, writes_stats};
    step.gemm = int(program_.gemms.size());
    program_.gemms.push_back(plan);
    program_.steps.push_back(step);
  }

  // kX += norm(kSum)
  void add_normalized(const NormRef& norm, const NormRef& before, const NormRef& next) {
    Op step{OpKind::kAddNormalized, Buffer::kSum, Buffer::kX};
    step.writes_stats = caps_.folds;
    step.norm = norm;
    step.before = before;
    step.next = next;
    program_.steps.push_back(step);
  }

  void normalize(Buffer x, Buffer y, const NormRef& norm) {
    Op step{OpKind::kNormalize, x, y};
    step.norm = norm;
    program_.steps.push_back(step);
  }

  const EncoderConfig& model_;
  const GemmCaps caps_;
  Program program_;
  NormRef pending_norm_;     // the LayerNorm of kX's rows that their readers apply
  bool x_has_sums_ = false;  // the rows of kX have row statistics
};

}  // namespace

Program compile(const EncoderConfig& model, const GemmCaps& caps) {
  return Compiler(model, caps).compile();
}

}  // namespace embert
