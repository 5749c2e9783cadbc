#include "encoder/program.h"

#include <algorithm>

namespace embert {
namespace {

class Compiler {
 public:
  Compiler(const EncoderConfig& model, const GemmCaps& able) : model_(model), caps_(able) {}

  Program compile() {
    embed();
    for (int i = 0; i < model_.layers; ++i) {
      attention(i);
      feed_forward(i);
    }
    if (!model_.pre_norm) {
      made_.last = waiting_;
    } else if (caps_.folds) {
      made_.last = {NormOf::kLast};
    } else {
      normalize(Buffer::kX, Buffer::kX, {NormOf::kLast});
    }
    const bool apart = model_.gated && !caps_.gates;  // gates and their results
    made_.inner_from = apart ? 2 * model_.inner : 0;
    made_.wide = std::max({4 * model_.attention_columns(), (apart ? 3 : 1) * model_.inner, model_.embedding_columns()});
    return made_;
  }

 private:
  // The embedding's LayerNorm is applied by its readers where they support it: not before a projection, which would
  // have to fold it, and not where the normalized row is itself the residual.
  void embed() {
    const bool projects = model_.embedding > 0, leaves = caps_.folds && !projects && !model_.pre_norm;
    Op step{OpKind::kEmbed};
    step.y = projects ? Buffer::kEmbedded : Buffer::kX;
    step.leaves_stats = leaves;
    made_.steps.push_back(step);
    if (leaves) waiting_ = {NormOf::kEmbedding};
    if (projects) product({Matrix::kProjection}, Buffer::kEmbedded, Buffer::kX);
  }

  void attention(int i) {
    const LayerAttention of = model_.attention_of(i);
    Buffer x = Buffer::kX;
    ProductPlan qkv{Matrix::kQkv, i, waiting_};
    if (model_.pre_norm && model_.has_attention_norm(i)) {
      if (x_has_sums_) {
        qkv.input = {NormOf::kAttention, i};
      } else {
        x = Buffer::kSum;
        normalize(Buffer::kX, x, {NormOf::kAttention, i});
      }
    }
    qkv.rope = of.rotary_dim > 0 && caps_.rope;
    product(qkv, x, Buffer::kQkv);
    Op step{OpKind::kRope, Buffer::kQkv, Buffer::kQkv};
    step.layer = i;
    if (of.rotary_dim > 0 && !caps_.rope) made_.steps.push_back(step);
    step.action = OpKind::kAttend;
    step.y = Buffer::kContext;
    step.product = int(made_.products.size());
    made_.steps.push_back(step);

    ProductPlan out{Matrix::kAttentionOut, i};
    out.residual = waiting_;
    out.next = inside(i);
    if (caps_.folds || !model_.pre_norm) {
      product(out, Buffer::kContext, Buffer::kSum, Buffer::kX, caps_.folds);
      if (!caps_.folds) normalize(Buffer::kSum, Buffer::kX, inside(i));
    } else {
      product(out, Buffer::kContext, Buffer::kX, Buffer::kX);
    }
  }

  void feed_forward(int i) {
    // Its rows: those of kSum, whose LayerNorm the GEMMs apply; or normalized ones.
    const Buffer rows = caps_.folds ? Buffer::kSum : Buffer::kX;
    Buffer x = rows, y = caps_.folds || model_.pre_norm ? Buffer::kX : Buffer::kSum;
    ProductPlan in{Matrix::kInner, i}, out{Matrix::kOut, i};
    if (caps_.folds) in.input = inside(i);
    if (caps_.folds && !model_.pre_norm) {
      out.residual = inside(i);
      out.next = i + 1 < model_.layers ? NormName{NormOf::kOut, i} : NormName{};  // no GEMM reads the last rows
    }
    if (!caps_.folds && model_.pre_norm) {
      x = Buffer::kSum;
      normalize(Buffer::kX, x, inside(i));
    }
    in.gates = model_.gated && caps_.gates;
    if (!model_.gated && !model_.pre_norm) {  // the rows are the residual, too
      in.joins = true;
      made_.products.push_back(in);
      made_.products.push_back(out);
      Op step{OpKind::kFeedForward, x, y};
      step.product = int(made_.products.size()) - 2;
      step.leaves_stats = caps_.folds;
      made_.steps.push_back(step);
    } else {
      const bool apart = model_.gated && !caps_.gates;
      product(in, x, apart ? Buffer::kGates : Buffer::kInner);
      if (apart) made_.steps.push_back({OpKind::kGate, Buffer::kGates, Buffer::kInner});
      product(out, Buffer::kInner, y, rows, caps_.folds);
    }
    x_has_sums_ = caps_.folds;
    if (model_.pre_norm) return;
    waiting_ = caps_.folds ? NormName{NormOf::kOut, i} : NormName{};
    if (!caps_.folds) normalize(Buffer::kSum, Buffer::kX, {NormOf::kOut, i});
  }

  // The LayerNorm between attention and the feed-forward layer.
  NormName inside(int i) const { return {model_.pre_norm ? NormOf::kOut : NormOf::kAttention, i}; }

  void product(const ProductPlan& plan, Buffer x, Buffer y, Buffer residual = Buffer::kNothing,
               bool leaves_stats = false) {
    Op step{OpKind::kProduct, x, y, residual, leaves_stats};
    step.product = int(made_.products.size());
    made_.products.push_back(plan);
    made_.steps.push_back(step);
  }

  void normalize(Buffer x, Buffer y, const NormName& norm) {
    Op step{OpKind::kNormalize, x, y};
    step.norm = norm;
    made_.steps.push_back(step);
  }

  const EncoderConfig& model_;
  const GemmCaps caps_;
  Program made_;
  NormName waiting_;         // the LayerNorm of kX's rows that their readers apply
  bool x_has_sums_ = false;  // the rows of kX have row statistics
};

}  // namespace

Program compile(const EncoderConfig& model, const GemmCaps& able) {
  return Compiler(model, able).compile();
}

}  // namespace embert
