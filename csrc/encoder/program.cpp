#include "encoder/program.h"

#include <algorithm>

namespace embert {
namespace {

class Compiler {
 public:
  Compiler(const EncoderConfig& model, const Abilities& able) : model_(model), able_(able) {}

  Program compile() {
    embed();
    for (int i = 0; i < model_.layers; ++i) {
      attention(i);
      feed_forward(i);
    }
    if (!model_.pre_norm) {
      made_.last = waiting_;
    } else if (able_.folds) {
      made_.last = {NormOf::kLast};
    } else {
      normalise(Place::kX, Place::kX, {NormOf::kLast});
    }
    const bool apart = model_.gated && !able_.gates;  // gates and what they make
    made_.inner_from = apart ? 2 * model_.inner : 0;
    made_.wide = std::max({4 * model_.attention_columns(), (apart ? 3 : 1) * model_.inner, model_.embedding_columns()});
    return made_;
  }

 private:
  // The embedding's LayerNorm is left to its readers where these apply it: not before a projection, which would have to
  // fold it, and not where the normalised row is itself the residual.
  void embed() {
    const bool projects = model_.embedding > 0, leaves = able_.folds && !projects && !model_.pre_norm;
    Step step{Action::kEmbed};
    step.y = projects ? Place::kEmbedded : Place::kX;
    step.leaves_sums = leaves;
    made_.steps.push_back(step);
    if (leaves) waiting_ = {NormOf::kEmbedding};
    if (projects) product({Matrix::kProjection}, Place::kEmbedded, Place::kX);
  }

  void attention(int i) {
    const LayerAttention of = model_.attention_of(i);
    Place x = Place::kX;
    ProductPlan qkv{Matrix::kQkv, i, waiting_};
    if (model_.pre_norm && model_.has_attention_norm(i)) {
      if (x_has_sums_) {
        qkv.input = {NormOf::kAttention, i};
      } else {
        x = Place::kSum;
        normalise(Place::kX, x, {NormOf::kAttention, i});
      }
    }
    qkv.turns = of.turned > 0 && able_.turns;
    product(qkv, x, Place::kQkv);
    Step step{Action::kTurn, Place::kQkv, Place::kQkv};
    step.layer = i;
    if (of.turned > 0 && !able_.turns) made_.steps.push_back(step);
    step.action = Action::kAttend;
    step.y = Place::kContext;
    step.product = int(made_.products.size());
    made_.steps.push_back(step);

    ProductPlan out{Matrix::kAttentionOut, i};
    out.residual = waiting_;
    out.next = inside(i);
    if (able_.folds || !model_.pre_norm) {
      product(out, Place::kContext, Place::kSum, Place::kX, able_.folds);
      if (!able_.folds) normalise(Place::kSum, Place::kX, inside(i));
    } else {
      product(out, Place::kContext, Place::kX, Place::kX);
    }
  }

  void feed_forward(int i) {
    // Its rows: those of kSum, whose LayerNorm the products apply; or normalised ones.
    const Place rows = able_.folds ? Place::kSum : Place::kX;
    Place x = rows, y = able_.folds || model_.pre_norm ? Place::kX : Place::kSum;
    ProductPlan in{Matrix::kInner, i}, out{Matrix::kOut, i};
    if (able_.folds) in.input = inside(i);
    if (able_.folds && !model_.pre_norm) {
      out.residual = inside(i);
      out.next = i + 1 < model_.layers ? NormName{NormOf::kOut, i} : NormName{};  // no product reads the last rows
    }
    if (!able_.folds && model_.pre_norm) {
      x = Place::kSum;
      normalise(Place::kX, x, inside(i));
    }
    in.gates = model_.gated && able_.gates;
    if (!model_.gated && !model_.pre_norm) {  // the rows are the residual, too
      in.joins = true;
      made_.products.push_back(in);
      made_.products.push_back(out);
      Step step{Action::kFeedForward, x, y};
      step.product = int(made_.products.size()) - 2;
      step.leaves_sums = able_.folds;
      made_.steps.push_back(step);
    } else {
      const bool apart = model_.gated && !able_.gates;
      product(in, x, apart ? Place::kGates : Place::kInner);
      if (apart) made_.steps.push_back({Action::kGate, Place::kGates, Place::kInner});
      product(out, Place::kInner, y, rows, able_.folds);
    }
    x_has_sums_ = able_.folds;
    if (model_.pre_norm) return;
    waiting_ = able_.folds ? NormName{NormOf::kOut, i} : NormName{};
    if (!able_.folds) normalise(Place::kSum, Place::kX, {NormOf::kOut, i});
  }

  // The LayerNorm between attention and the feed-forward part.
  NormName inside(int i) const { return {model_.pre_norm ? NormOf::kOut : NormOf::kAttention, i}; }

  void product(const ProductPlan& plan, Place x, Place y, Place residual = Place::kNothing, bool leaves_sums = false) {
    Step step{Action::kProduct, x, y, residual, leaves_sums};
    step.product = int(made_.products.size());
    made_.products.push_back(plan);
    made_.steps.push_back(step);
  }

  void normalise(Place x, Place y, const NormName& norm) {
    Step step{Action::kNormalise, x, y};
    step.norm = norm;
    made_.steps.push_back(step);
  }

  const EncoderConfig& model_;
  const Abilities able_;
  Program made_;
  NormName waiting_;         // the LayerNorm after the rows of kX that is left to their readers
  bool x_has_sums_ = false;  // the rows of kX have sums
};

}  // namespace

Program compile(const EncoderConfig& model, const Abilities& able) {
  return Compiler(model, able).compile();
}

}  // namespace embert
