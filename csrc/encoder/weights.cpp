#include "encoder/weights.h"

#include <algorithm>
#include <tuple>

namespace embert {

// Divides memory among tensors, and names them.
class Weights::Layout {
 public:
  Layout(Weights& weights, uint8_t* base) : tensors_(weights.tensors_), arena_(base) { tensors_.clear(); }

  template <typename T = uint8_t>
  T* take(size_t count) {
    return arena_.take<T>(count);
  }
  uint8_t* take(size_t rows, size_t columns, DType type) { return take(rows * columns * bytes_of(type)); }
  void add(int layer, const std::string& name, const WeightView& view) { tensors_[{layer, name}] = view; }
  uint8_t* matrix(int layer, const std::string& name, size_t rows, size_t columns, DType type) {
    uint8_t* const to = take(rows, columns, type);
    add(layer, name, {to, {rows, columns}, type});
    return to;
  }
  float* vector(int layer, const std::string& name, const TensorShape& shape) {
    float* const to = take<float>(elements_of(shape));
    add(layer, name, {to, shape});
    return to;
  }
  Norm norm(int layer, const std::string& name, size_t columns) {
    const float* const gamma = vector(layer, name + "gamma", {columns});
    return {gamma, vector(layer, name + "beta", {columns})};
  }
  // An RMSNorm without beta.
  Norm gamma(int layer, const std::string& name, size_t columns) {
    return {vector(layer, name + ".gamma", {columns}), nullptr};
  }
  size_t used() const { return arena_.used(); }

 private:
  std::map<std::pair<int, std::string>, WeightView>& tensors_;
  Arena arena_;
};

void Weights::lay_out(uint8_t* base, size_t& bytes) {
  Layout layout(*this, base);
  const size_t hidden = model_.hidden, embedding = model_.embedding_columns(), inputs = model_.layer_inputs;
  const DType dtype = model_.dtype;
  tables_.word = layout.matrix(-1, "word", model_.vocabulary, embedding, dtype);
  tables_.position = tables_.type = nullptr;
  if (model_.embedding_norm) {
    // Without a table all rows add the same one, of zeros.
    const size_t rows = model_.position_table ? model_.position_rows() : 1;
    uint8_t* const position = layout.take(rows, embedding, dtype);
    tables_.position = position;
    if (model_.position_table) layout.add(-1, "position", {position, {size_t(model_.positions), embedding}, dtype});
    if (model_.padding)
      layout.add(-1, "padding", {position + model_.positions * embedding * bytes_of(dtype), {1, embedding}, dtype});
    tables_.norm = layout.norm(-1, "", model_.projects_first ? hidden : embedding);
    norms_[int(NormKind::kEmbedding)] = tables_.norm;
  }
  if (model_.types > 0) tables_.type = layout.matrix(-1, "type", model_.types, embedding, dtype);
  layers_.resize(model_.stored_layers());
  for (int i = 0; i < int(layers_.size()); ++i) lay_out_layer(layout, i);
  if (model_.embedding > 0) {
    uint8_t* const weight = layout.matrix(-1, "projection.weight", hidden, embedding, dtype);
    projection_ = {weight, layout.vector(-1, "projection.bias", {hidden}), model_.hidden, model_.embedding};
  }
  if (inputs > 0) norms_[int(NormKind::kInputs)] = layout.gamma(-1, "inputs", inputs);
  if (model_.pre_norm) norms_[int(NormKind::kLast)] = layout.norm(-1, "last.", hidden);
  angles_.clear();
  const size_t positions = model_.positions;
  for (const int columns : model_.angle_tables()) {
    float2* const table = layout.take<float2>(positions * columns);
    layout.add(int(angles_.size()), "angles", {table, {positions, size_t(columns), 2}});
    angles_.push_back(table);
  }
  if (model_.relative) {
    relative_ = layout.take<float>(size_t(model_.heads) * 2 * model_.reach());
    layout.add(-1, "relative", {relative_, {size_t(model_.heads), 2 * positions - 1}});
  }
  if (model_.distance_rows > 0) {
    distances_ = layout.take<int16_t>(2 * positions - 1);
    layout.add(-1, "distances", {distances_, {2 * positions - 1}});
  }
  lay_out_heads(layout);
  bytes = layout.used();
}

void Weights::lay_out_layer(Layout& layout, int i) {
  const size_t hidden = model_.hidden, inner = model_.inner, inputs = model_.layer_inputs;
  const DType dtype = model_.dtype, layer_dtype = model_.int8 ? DType::kInt8 : dtype;
  LayerWeights& layer = layers_[i];
  const AttentionHeads heads = model_.attention_heads(i);
  const size_t attention = heads.columns(), keys = heads.key_columns(), qkv = model_.qkv_columns(i);
  widest_qkv_ = std::max(widest_qkv_, int(qkv));
  // Parts: names, first rows and counts of the tensors that a matrix consists of.
  using Parts = std::vector<std::tuple<const char*, size_t, size_t>>;
  const auto linear = [&](Matrix kind, const Parts& parts, size_t rows, size_t columns) -> const MatrixWeights& {
    MatrixWeights& to = layer.matrices[int(kind)];
    to = {layout.take(rows, columns, layer_dtype), nullptr, int(rows), int(columns)};
    if (model_.int8) to.scales = layout.take<float>(rows);
    to.bias = layout.take<float>(rows);
    for (const auto& [part, first, count] : parts) {
      const std::string name = part;
      uint8_t* const weight = to.weight + first * columns * bytes_of(layer_dtype);
      layout.add(i, name + ".weight", {weight, {count, columns}, layer_dtype});
      layout.add(i, name + ".bias", {to.bias + first, {count}});
      if (model_.int8) layout.add(i, name + ".scale", {to.scales + first, {count}});
    }
    return to;
  };
  const auto whole = [&](Matrix kind, const char* name, size_t rows, size_t columns) {
    linear(kind, {{name, 0, rows}}, rows, columns);
  };
  const auto norm = [&](NormKind kind) -> Norm& { return layer.norms[int(kind)]; };

  const bool convolves = model_.convolves(i);
  const Parts queries = {{"query", 0, attention}, {"key", attention, keys}, {"value", attention + keys, keys}};
  linear(Matrix::kQkv, convolves ? Parts{{"convolution", 0, qkv}} : queries, qkv, hidden);
  whole(Matrix::kAttentionOut, "attention", hidden, model_.context_columns(i));
  if (!model_.pre_norm || model_.first_norm || i != model_.stored(0)) {
    norm(NormKind::kAttention) = layout.norm(i, "attention.", hidden);
  } else {
    norm(NormKind::kAttention) = {layout.take<float>(hidden), layout.take<float>(hidden)};
  }
  if (model_.has_experts(i)) {
    const size_t experts = model_.experts;
    layer.router = layout.vector(i, "router.weight", {experts, hidden});
    layer.experts_inner = layout.matrix(i, "experts_inner.weight", experts * inner, hidden, dtype);
    layer.experts_out = layout.matrix(i, "experts_out.weight", experts * hidden, inner, dtype);
    layer.experts_bias = layout.vector(i, "experts.bias", {hidden});
  } else {
    const Parts parts = {{"inner", 0, inner}};
    const MatrixWeights& to = linear(Matrix::kInner, model_.gated ? Parts() : parts, inner_rows(), hidden);
    for (const auto& [part, name] : {std::pair(0, "gate"), std::pair(1, "inner")}) {
      if (!model_.gated) break;  // otherwise rows of the gate and of its value alternate
      const size_t first = gated_row(0, part);
      uint8_t* const weight = to.weight + first * hidden * bytes_of(dtype);
      layout.add(i, name + std::string(".weight"), {weight, {inner, hidden}, dtype, 2 * hidden, true});
      layout.add(i, name + std::string(".bias"), {to.bias + first, {inner}, DType::kFloat32, 2, true});
    }
    whole(Matrix::kOut, "out", hidden, inner);
  }
  norm(NormKind::kOut) = layout.norm(i, "out.", hidden);
  if (model_.int8) {
    layer.qkv_norm = layout.norm(i, "query.", hidden);
    layer.inner_norm = layout.norm(i, "inner.", hidden);
  }
  if (convolves) {
    layer.taps.weight = layout.vector(i, "taps.weight", {size_t(model_.attention_of(i).taps), hidden});
    layer.taps.bias = layout.vector(i, "taps.bias", {hidden});
  }
  if (model_.qk_norm && !convolves) {
    layer.query_norm = layout.vector(i, "query_norm.gamma", {size_t(heads.head_size)});
    layer.key_norm = layout.vector(i, "key_norm.gamma", {size_t(heads.head_size)});
  }
  if (model_.sublayer_norms) {
    norm(NormKind::kAttentionSublayer) = layout.gamma(i, "attention_sublayer", hidden);
    norm(NormKind::kOutSublayer) = layout.gamma(i, "out_sublayer", hidden);
  }
  if (inputs > 0) {
    whole(Matrix::kInput, "input", inputs, hidden);
    whole(Matrix::kInputGate, "input_gate", inputs, hidden);
    whole(Matrix::kInputDense, "input_dense", hidden, inputs);
    norm(NormKind::kInputSublayer) = layout.gamma(i, "input_sublayer", hidden);
    layer.input_divisors = layout.vector(i, "input_divisors", {hidden});
  }
  const auto distances = [&](bool exists, const char* name) {
    return exists ? layout.matrix(i, name, model_.distance_rows, attention, dtype) : nullptr;
  };
  layer.distance_keys = distances(model_.distance_keys, "distance_keys");
  layer.distance_queries = distances(model_.distance_queries, "distance_queries");
}

void Weights::lay_out_heads(Layout& layout) {
  const TaskHeads& heads = model_.task_heads;
  const size_t hidden = model_.hidden, vocabulary = model_.vocabulary;
  const auto layers = [&](const std::string& name, const std::vector<DenseShape>& shapes, std::vector<DenseLayer>& to) {
    to.clear();
    for (const DenseShape& shape : shapes) {
      const int index = int(to.size());
      const size_t in = shape.in, out = shape.out, pitch = dense_pitch(shape.in);
      float* const weight = layout.take<float>(out * pitch);
      layout.add(index, name + ".weight", {weight, {out, in}, DType::kFloat32, pitch});
      to.push_back({shape, weight, layout.vector(index, name + ".bias", {out})});
    }
  };
  layers("dense", heads.dense, heads_.dense);
  layers("classifier", heads.classifier, heads_.classifier);
  heads_.multi.clear();
  for (const DenseShape& shape : heads.multi) {
    const int index = int(heads_.multi.size());
    uint8_t* const weight = layout.matrix(index, "multi.weight", shape.out, shape.in, model_.dtype);
    heads_.multi.push_back({shape, weight, layout.vector(index, "multi.bias", {size_t(shape.out)})});
  }
  if (heads.token_norm) heads_.multi_norm = layout.norm(-1, "multi.", hidden);
  if (heads.token_weights) {
    heads_.token_weight = layout.vector(-1, "token_weights.weight", {1, hidden});
    heads_.token_bias = layout.vector(-1, "token_weights.bias", {1});
  }
  if (heads.label_mass)
    heads_.vocabulary =
        heads.tied_vocabulary ? tables_.word : layout.matrix(-1, "vocabulary.weight", vocabulary, hidden, model_.dtype);
  if (!heads.splade) return;
  SpladeWeights& splade = heads_.splade;
  splade.transform = layout.matrix(-1, "splade.transform.weight", hidden, hidden, model_.dtype);
  splade.transform_bias = layout.vector(-1, "splade.transform.bias", {hidden});
  splade.gamma = layout.vector(-1, "splade.transform.gamma", {hidden});
  splade.beta = layout.vector(-1, "splade.transform.beta", {hidden});
  splade.decoder_bias = layout.vector(-1, "splade.decoder.bias", {vocabulary});
  splade.decoder = heads.splade->tied ? const_cast<void*>(tables_.word)
                                      : layout.matrix(-1, "splade.decoder.weight", vocabulary, hidden, model_.dtype);
}

Status Weights::allocate() {
  size_t bytes = 0, largest = 0, interleaved = 0;  // the latter: elements that are converted at a time
  lay_out(nullptr, bytes);
  EMBERT_TRY(storage_.allocate(bytes));
  lay_out(storage_.as(), bytes);
  if (!model_.position_table) EMBERT_TRY(storage_.zero());
  for (const auto& [name, view] : tensors_) {
    const size_t count = std::min(elements_of(view.shape), kConvertedElements);
    largest = std::max(largest, count);
    if (view.interleaved) interleaved = std::max(interleaved, count);
  }
  EMBERT_TRY(conversion_.allocate(largest * sizeof(float)));
  return interleave_scratch_.allocate(interleaved * sizeof(float));
}

Norm Weights::norm(const NormRef& name) const {
  const bool of_model =
      name.kind == NormKind::kEmbedding || name.kind == NormKind::kLast || name.kind == NormKind::kInputs;
  if (!name.exists()) return {};
  return (of_model ? norms_ : layer(name.layer).norms)[int(name.kind)];
}

Norm Weights::input_norm(const GemmPlan& plan) const {
  if (!model_.int8 || !plan.input.exists()) return norm(plan.input);
  const LayerWeights& w = layer(plan.layer);
  return plan.matrix == Matrix::kQkv ? w.qkv_norm : w.inner_norm;
}

MatrixWeights Weights::matrix(Matrix kind, int layer_index) const {
  if (kind == Matrix::kProjection) return projection_;
  MatrixWeights found = layer(layer_index).matrices[int(kind)];
  if (exact_.bytes() == 0 || (kind != Matrix::kQkv && kind != Matrix::kInner)) return found;
  found.exact = exact_.as<float>() + model_.stored(layer_index) * exact_count();
  if (kind == Matrix::kInner) found.exact += size_t(model_.qkv_columns(layer_index)) * model_.hidden;
  return found;
}

Status Weights::split_gammas(const Stream& stream) {
  for (const LayerWeights& w : layers_) {
    for (const auto& [kind, norm] :
         {std::pair(Matrix::kQkv, NormKind::kAttention), std::pair(Matrix::kInner, NormKind::kOut)}) {
      const MatrixWeights& matrix = w.matrices[int(kind)];
      auto* const gamma = const_cast<float*>(w.norms[int(norm)].gamma);
      EMBERT_TRY(split_gamma(model_.dtype, matrix.weight, gamma, matrix.out, model_.hidden, stream));
    }
  }
  return {};
}

}  // namespace embert
