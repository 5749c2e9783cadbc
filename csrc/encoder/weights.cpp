#include "encoder/weights.h"

#include <algorithm>
#include <tuple>
#include <type_traits>

namespace embert {

void Weights::lay_out(uint8_t* base, size_t& bytes) {
  Arena arena(base);
  const size_t size = bytes_of(model_.dtype);
  const size_t hidden = model_.hidden, inner = model_.inner, embedding = model_.embedding_columns();
  const size_t attention = model_.attention_columns(), qkv = model_.qkv_columns(), head = model_.head_size();
  const auto matrix = [&](size_t rows, size_t columns) { return arena.take(rows * columns * size); };
  const auto vector = [&](size_t count) { return arena.take<float>(count); };
  const auto norm = [&](size_t columns) {
    const float* const gamma = vector(columns);
    return Norm{gamma, vector(columns)};
  };
  tables_.word = matrix(model_.vocabulary, embedding);
  // Without a table, the first kernel for few rows reads zeros.
  if (model_.embedding_norm) {
    tables_.position = matrix(model_.position_table ? model_.position_rows() : kSmallRows, embedding);
    tables_.type = matrix(model_.types, embedding);
    tables_.norm = norm(model_.projects_first ? hidden : embedding);
  } else {
    tables_.position = tables_.type = nullptr;
  }
  if (model_.types == 0) tables_.type = nullptr;
  layers_.resize(model_.stored_layers());
  const size_t layer_size = bytes_of(matrix_dtype());
  const auto layer_matrix = [&](size_t rows, size_t columns) { return arena.take(rows * columns * layer_size); };
  const auto scales = [&](size_t rows) { return model_.int8 ? vector(rows) : nullptr; };
  for (LayerWeights& layer : layers_) {
    layer.qkv_weight = layer_matrix(qkv, hidden);
    layer.qkv_scale = scales(qkv);
    layer.qkv_bias = vector(qkv);
    layer.attention_weight = layer_matrix(hidden, attention);
    layer.attention_scale = scales(hidden);
    layer.attention_bias = vector(hidden);
    layer.attention_norm = norm(hidden);
    layer.inner_weight = layer_matrix(inner_rows(), hidden);
    layer.inner_scale = scales(inner_rows());
    layer.inner_bias = vector(inner_rows());
    layer.out_weight = layer_matrix(hidden, inner);
    layer.out_scale = scales(hidden);
    layer.out_bias = vector(hidden);
    layer.out_norm = norm(hidden);
    layer.qkv_norm = model_.int8 ? norm(hidden) : Norm{};
    layer.inner_norm = model_.int8 ? norm(hidden) : Norm{};
    layer.query_norm = model_.qk_norm ? vector(head) : nullptr;
    layer.key_norm = model_.qk_norm ? vector(head) : nullptr;
    layer.attention_sublayer = model_.sublayer_norms ? vector(hidden) : nullptr;
    layer.out_sublayer = model_.sublayer_norms ? vector(hidden) : nullptr;
    layer.distance_keys = model_.distance_keys ? matrix(model_.distance_rows, attention) : nullptr;
    layer.distance_queries = model_.distance_queries ? matrix(model_.distance_rows, attention) : nullptr;
  }
  if (model_.embedding > 0) {
    projection_weight_ = matrix(hidden, embedding);
    projection_bias_ = vector(hidden);
  }
  if (model_.pre_norm) last_norm_ = norm(hidden);
  angles_.clear();
  for (const int columns : model_.angle_tables())
    angles_.push_back(arena.take<float2>(size_t(model_.positions) * columns));
  if (model_.relative) relative_ = arena.take<float>(size_t(model_.heads) * 2 * model_.reach());
  if (model_.distance_rows > 0) distances_ = arena.take<int16_t>(2 * size_t(model_.positions) - 1);
  heads_.lay_out(arena, model_.task_heads, model_.hidden, model_.dtype);
  bytes = arena.used();
}

Status Weights::allocate() {
  size_t bytes = 0;
  lay_out(nullptr, bytes);
  EMBERT_TRY(storage_.allocate(bytes));
  lay_out(storage_.as(), bytes);
  if (!model_.position_table) EMBERT_TRY(storage_.zero());
  const size_t hidden = model_.hidden, inner = model_.inner, attention = model_.attention_columns();
  const size_t largest =
      std::max({size_t(model_.vocabulary), size_t(model_.positions), size_t(model_.distance_rows), inner, attention}) *
      hidden;
  EMBERT_TRY(conversion_.allocate(std::min(std::max(largest, heads_.largest()), kConvertedElements) * 4));
  return model_.gated ? interleave_scratch_.allocate(std::min(inner * hidden, kConvertedElements) * 4) : Status();
}

Status Weights::find(const std::string& name, int layer, WeightView& place) const {
  if (heads_.find(name, layer, place)) return {};
  const size_t hidden = model_.hidden, embedding = model_.embedding_columns();
  const size_t normed = model_.projects_first ? hidden : embedding;
  const auto matrix = [&](const char* tensor_name, const void* base, size_t rows, size_t columns, size_t before = 0) {
    if (name != tensor_name) return false;
    auto* const first = static_cast<uint8_t*>(const_cast<void*>(base));
    place = {first + before * rows * columns * bytes_of(model_.dtype), {rows, columns}, model_.dtype};
    return base != nullptr;
  };
  const auto vector = [&](const char* tensor_name, const float* to, size_t count) {
    if (name != tensor_name) return false;
    place = {const_cast<float*>(to), {count}, DType::kFloat32};
    return to != nullptr;
  };
  bool is_known = false;
  if (layer < 0) {
    is_known = matrix("word", tables_.word, model_.vocabulary, embedding) ||
               (model_.position_table && matrix("position", tables_.position, model_.positions, embedding)) ||
               (model_.padding && matrix("padding", tables_.position, 1, embedding, model_.positions)) ||
               matrix("type", tables_.type, model_.types, embedding) || vector("gamma", tables_.norm.gamma, normed) ||
               vector("beta", tables_.norm.beta, normed) ||
               matrix("projection.weight", projection_weight_, hidden, embedding) ||
               vector("projection.bias", projection_bias_, hidden) || vector("last.gamma", last_norm_.gamma, hidden) ||
               vector("last.beta", last_norm_.beta, hidden);
  } else if (layer < model_.stored_layers()) {
    is_known = find_layer(name, layer, place);
  }
  if (is_known) return {};
  return Status::refused("this model has no weight ", called(name, layer));
}

bool Weights::find_layer(const std::string& name, int number, WeightView& place) const {
  const LayerWeights& w = layers_[number];
  const size_t hidden = model_.hidden, inner = model_.inner, attention = model_.attention_columns();
  const size_t keys = model_.key_columns(), head = model_.head_size();
  const auto matrix = [&](const char* tensor_name, uint8_t* base, size_t rows, size_t columns, size_t first_row = 0) {
    if (name != tensor_name) return false;
    place = {base + first_row * columns * bytes_of(matrix_dtype()), {rows, columns}, matrix_dtype()};
    return true;
  };
  const auto vector = [&](const char* tensor_name, const float* to, size_t count, size_t before = 0) {
    if (to == nullptr || name != tensor_name) return false;
    place = {const_cast<float*>(to) + before, {count}, DType::kFloat32};
    return true;
  };
  // Rows of the gate and of its value alternate.
  const auto interleaved = [&](const std::string& tensor_name, int part) {
    if (name == tensor_name + ".weight") {
      const size_t row = gated_row(0, part) * hidden * bytes_of(model_.dtype);
      place = {w.inner_weight + row, {inner, hidden}, model_.dtype, 2 * hidden, true};
    } else if (name == tensor_name + ".bias") {
      place = {w.inner_bias + gated_row(0, part), {inner}, DType::kFloat32, 2, true};
    } else {
      return false;
    }
    return true;
  };
  if (model_.gated && (interleaved("gate", 0) || interleaved("inner", 1))) return true;
  const bool has_norm = !model_.pre_norm || model_.first_norm || number != model_.stored(0);
  return matrix("query.weight", w.qkv_weight, attention, hidden) ||
         matrix("key.weight", w.qkv_weight, keys, hidden, attention) ||
         matrix("value.weight", w.qkv_weight, keys, hidden, attention + keys) ||
         vector("query.bias", w.qkv_bias, attention) || vector("key.bias", w.qkv_bias + attention, keys) ||
         vector("value.bias", w.qkv_bias + attention + keys, keys) || vector("query_norm.gamma", w.query_norm, head) ||
         vector("key_norm.gamma", w.key_norm, head) ||
         vector("attention_sublayer.gamma", w.attention_sublayer, hidden) ||
         vector("out_sublayer.gamma", w.out_sublayer, hidden) ||
         (model_.distance_keys && matrix("distance_keys", w.distance_keys, model_.distance_rows, attention)) ||
         (model_.distance_queries && matrix("distance_queries", w.distance_queries, model_.distance_rows, attention)) ||
         matrix("attention.weight", w.attention_weight, hidden, attention) ||
         vector("attention.bias", w.attention_bias, hidden) ||
         (has_norm && vector("attention.gamma", w.attention_norm.gamma, hidden)) ||
         (has_norm && vector("attention.beta", w.attention_norm.beta, hidden)) ||
         vector("query.scale", w.qkv_scale, hidden) || vector("key.scale", w.qkv_scale, hidden, hidden) ||
         vector("value.scale", w.qkv_scale, hidden, 2 * hidden) ||
         vector("attention.scale", w.attention_scale, hidden) || vector("inner.scale", w.inner_scale, inner) ||
         vector("out.scale", w.out_scale, hidden) || vector("query.gamma", w.qkv_norm.gamma, hidden) ||
         vector("query.beta", w.qkv_norm.beta, hidden) || vector("inner.gamma", w.inner_norm.gamma, hidden) ||
         vector("inner.beta", w.inner_norm.beta, hidden) || matrix("inner.weight", w.inner_weight, inner, hidden) ||
         vector("inner.bias", w.inner_bias, inner) || matrix("out.weight", w.out_weight, hidden, inner) ||
         vector("out.bias", w.out_bias, hidden) || vector("out.gamma", w.out_norm.gamma, hidden) ||
         vector("out.beta", w.out_norm.beta, hidden);
}

Norm Weights::norm(const NormRef& name) const {
  switch (name.kind) {
    case NormKind::kEmbedding:
      return tables_.norm;
    case NormKind::kAttention:
      return layer(name.layer).attention_norm;
    case NormKind::kOut:
      return layer(name.layer).out_norm;
    case NormKind::kLast:
      return last_norm_;
    case NormKind::kAttentionSublayer:
      return {layer(name.layer).attention_sublayer, nullptr};
    case NormKind::kOutSublayer:
      return {layer(name.layer).out_sublayer, nullptr};
    default:
      return {};
  }
}

Norm Weights::input_norm(const GemmPlan& plan) const {
  if (!model_.int8 || !plan.input.exists()) return norm(plan.input);
  const LayerWeights& w = layer(plan.layer);
  return plan.matrix == Matrix::kQkv ? w.qkv_norm : w.inner_norm;
}

MatrixWeights Weights::matrix(Matrix kind, int layer_index) const {
  const int hidden = model_.hidden, attention = model_.attention_columns();
  if (kind == Matrix::kProjection) return {projection_weight_, projection_bias_, hidden, model_.embedding, nullptr};
  const LayerWeights& w = layer(layer_index);
  const float* const exact =
      exact_.bytes() == 0 ? nullptr : exact_.as<float>() + model_.stored(layer_index) * exact_count();
  switch (kind) {
    case Matrix::kQkv:
      return {w.qkv_weight, w.qkv_bias, model_.qkv_columns(), hidden, exact, w.qkv_scale};
    case Matrix::kAttentionOut:
      return {w.attention_weight, w.attention_bias, hidden, attention, nullptr, w.attention_scale};
    case Matrix::kInner:
      return {w.inner_weight,
              w.inner_bias,
              inner_rows(),
              hidden,
              exact == nullptr ? nullptr : exact + size_t(model_.qkv_columns()) * hidden,
              w.inner_scale};
    default:
      return {w.out_weight, w.out_bias, hidden, model_.inner, nullptr, w.out_scale};
  }
}

Status Weights::split_gammas(const Stream& stream) {
  for (LayerWeights& w : layers_) {
    for (const auto& [weight, norm, rows] : {std::tuple(w.qkv_weight, w.attention_norm, model_.qkv_columns()),
                                             std::tuple(w.inner_weight, w.out_norm, inner_rows())}) {
      EMBERT_TRY(split_gamma(model_.dtype, weight, const_cast<float*>(norm.gamma), rows, model_.hidden, stream));
    }
  }
  return {};
}

void HeadWeights::lay_out(Arena& arena, const TaskHeads& heads, int hidden, DType dtype) {
  heads_ = heads;
  hidden_ = hidden;
  dtype_ = dtype;
  const auto vector = [&](size_t count) { return arena.take<float>(count); };
  const auto layers = [&](const std::vector<DenseShape>& shapes, std::vector<DenseLayer>& layers_out) {
    layers_out.clear();
    for (const DenseShape& shape : shapes) {
      const float* const weight = vector(size_t(shape.out) * dense_pitch(shape.in));
      layers_out.push_back({shape, weight, vector(shape.out)});
    }
  };
  layers(heads.dense, dense_);
  layers(heads.classifier, classifier_);
  multi_.clear();
  for (const DenseShape& shape : heads.multi) {
    uint8_t* const weight = arena.take(size_t(shape.out) * shape.in * bytes_of(dtype));
    multi_.push_back({shape, weight, vector(shape.out)});
  }
  if (heads.token_norm) multi_norm_ = {vector(hidden), vector(hidden)};
  if (heads.token_weights) {
    token_weight_ = vector(hidden);
    token_bias_ = vector(1);
  }
}

bool HeadWeights::find(const std::string& name, int index, WeightView& place) const {
  const auto in_layers = [&](const std::string& head, const auto& layers) {
    if (index < 0 || index >= int(layers.size())) return false;
    const auto& layer = layers[index];
    const size_t in = layer.shape.in, out = layer.shape.out;
    constexpr bool kIsPadded = std::is_same_v<decltype(layer), const DenseLayer&>;
    if (name == head + ".weight") {
      place = {
          const_cast<void*>(static_cast<const void*>(layer.weight)), {out, in}, kIsPadded ? DType::kFloat32 : dtype_};
      if (kIsPadded) place.pitch = dense_pitch(layer.shape.in);
      return true;
    }
    if (name != head + ".bias") return false;
    place = {const_cast<float*>(layer.bias), {out}, DType::kFloat32};
    return true;
  };
  if (in_layers("dense", dense_) || in_layers("classifier", classifier_) || in_layers("multi", multi_)) return true;
  if (index < 0 && heads_.token_norm && (name == "multi.gamma" || name == "multi.beta")) {
    place = {const_cast<float*>(name == "multi.gamma" ? multi_norm_.gamma : multi_norm_.beta),
             {size_t(hidden_)},
             DType::kFloat32};
    return true;
  }
  if (index >= 0 || !heads_.token_weights) return false;
  if (name == "token_weights.weight") {
    place = {token_weight_, {1, size_t(hidden_)}, DType::kFloat32};
  } else if (name == "token_weights.bias") {
    place = {token_bias_, {1}, DType::kFloat32};
  } else {
    return false;
  }
  return true;
}

std::vector<std::pair<int, std::string>> HeadWeights::names() const {
  std::vector<std::pair<int, std::string>> all;
  const auto add = [&](int index, const std::string& head) {
    all.emplace_back(index, head + ".weight");
    all.emplace_back(index, head + ".bias");
  };
  for (size_t i = 0; i < dense_.size(); ++i) add(int(i), "dense");
  for (size_t i = 0; i < classifier_.size(); ++i) add(int(i), "classifier");
  for (size_t i = 0; i < multi_.size(); ++i) add(int(i), "multi");
  if (heads_.token_norm) all.insert(all.end(), {{-1, "multi.gamma"}, {-1, "multi.beta"}});
  if (heads_.token_weights) add(-1, "token_weights");
  return all;
}

size_t HeadWeights::largest() const {
  size_t largest = hidden_;
  for (const auto* const shapes : {&heads_.dense, &heads_.classifier, &heads_.multi}) {
    for (const DenseShape& shape : *shapes) largest = std::max(largest, size_t(shape.out) * shape.in);
  }
  return largest;
}

}  // namespace embert
