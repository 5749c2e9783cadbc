#include "encoder/weights.h"

#include <algorithm>
#include <tuple>

namespace embert {

void Weights::lay_out(uint8_t* base, size_t& bytes) {
  Arena arena(base);
  tensors_.clear();
  const size_t hidden = model_.hidden, inner = model_.inner, embedding = model_.embedding_columns();
  const size_t inputs = model_.layer_inputs;
  const DType dtype = model_.dtype, layer_dtype = model_.int8 ? DType::kInt8 : dtype;
  const auto add = [&](int layer, const std::string& name, void* to, const TensorShape& shape, DType type) {
    tensors_[{layer, name}] = {to, shape, type};
  };
  const auto memory = [&](size_t rows, size_t columns, DType type) {
    return arena.take(rows * columns * bytes_of(type));
  };
  const auto matrix = [&](int layer, const std::string& name, size_t rows, size_t columns, DType type) {
    uint8_t* const to = memory(rows, columns, type);
    add(layer, name, to, {rows, columns}, type);
    return to;
  };
  const auto vector = [&](int layer, const std::string& name, size_t count) {
    float* const to = arena.take<float>(count);
    add(layer, name, to, {count}, DType::kFloat32);
    return to;
  };
  const auto norm = [&](int layer, const std::string& name, size_t columns) {
    const float* const gamma = vector(layer, name + "gamma", columns);
    return Norm{gamma, vector(layer, name + "beta", columns)};
  };

  tables_.word = matrix(-1, "word", model_.vocabulary, embedding, dtype);
  tables_.position = tables_.type = nullptr;
  if (model_.embedding_norm) {
    // Without a table, the first kernel for few rows reads zeros.
    const size_t rows = model_.position_table ? model_.position_rows() : kSmallRows;
    uint8_t* const position = memory(rows, embedding, dtype);
    tables_.position = position;
    if (model_.position_table) add(-1, "position", position, {size_t(model_.positions), embedding}, dtype);
    if (model_.padding)
      add(-1, "padding", position + model_.positions * embedding * bytes_of(dtype), {1, embedding}, dtype);
    if (model_.types > 0) tables_.type = matrix(-1, "type", model_.types, embedding, dtype);
    tables_.norm = norm(-1, "", model_.projects_first ? hidden : embedding);
  }
  layers_.resize(model_.stored_layers());
  for (int i = 0; i < int(layers_.size()); ++i) {
    LayerWeights& layer = layers_[i];
    const AttentionHeads heads = model_.attention_heads(i);
    const size_t attention = heads.columns(), keys = heads.key_columns(), qkv = model_.qkv_columns(i);
    widest_qkv_ = std::max(widest_qkv_, int(qkv));
    const auto scales = [&](size_t rows) { return model_.int8 ? arena.take<float>(rows) : nullptr; };
    const auto linear = [&](const std::string& name, size_t rows, size_t columns, uint8_t*& weight, float*& scale,
                            float*& bias) {
      weight = matrix(i, name + ".weight", rows, columns, layer_dtype);
      scale = scales(rows);
      if (model_.int8) add(i, name + ".scale", scale, {rows}, DType::kFloat32);
      bias = vector(i, name + ".bias", rows);
    };
    layer.qkv_weight = memory(qkv, hidden, layer_dtype);
    layer.qkv_scale = scales(qkv);
    layer.qkv_bias = arena.take<float>(qkv);
    const bool convolves = model_.convolves(i);
    std::vector<std::tuple<const char*, size_t, size_t>> parts = {
        {"query", 0, attention}, {"key", attention, keys}, {"value", attention + keys, keys}};
    if (convolves) parts = {{"convolution", 0, qkv}};
    for (const auto& [name, first, rows] : parts) {
      add(i, name + std::string(".weight"), layer.qkv_weight + first * hidden * bytes_of(layer_dtype), {rows, hidden},
          layer_dtype);
      add(i, name + std::string(".bias"), layer.qkv_bias + first, {rows}, DType::kFloat32);
      if (model_.int8) add(i, name + std::string(".scale"), layer.qkv_scale + first, {rows}, DType::kFloat32);
    }
    linear("attention", hidden, model_.context_columns(i), layer.attention_weight, layer.attention_scale,
           layer.attention_bias);
    if (!model_.pre_norm || model_.first_norm || i != model_.stored(0)) {
      layer.attention_norm = norm(i, "attention.", hidden);
    } else {
      layer.attention_norm = {arena.take<float>(hidden), arena.take<float>(hidden)};
    }
    const bool routes = model_.has_experts(i);
    if (routes) {
      const size_t experts = model_.experts;
      layer.router = arena.take<float>(experts * hidden);
      add(i, "router.weight", layer.router, {experts, hidden}, DType::kFloat32);
      layer.experts_inner = matrix(i, "experts_inner.weight", experts * inner, hidden, dtype);
      layer.experts_out = matrix(i, "experts_out.weight", experts * hidden, inner, dtype);
      layer.experts_bias = vector(i, "experts.bias", hidden);
    } else {
      linear("inner", inner_rows(), hidden, layer.inner_weight, layer.inner_scale, layer.inner_bias);
      linear("out", hidden, inner, layer.out_weight, layer.out_scale, layer.out_bias);
    }
    if (model_.gated) {  // rows of the gate and of its value alternate
      for (const auto& [name, part] : {std::pair("gate", 0), std::pair("inner", 1)}) {
        const size_t first = gated_row(0, part);
        tensors_[{i, name + std::string(".weight")}] = {
            layer.inner_weight + first * hidden * bytes_of(dtype), {inner, hidden}, dtype, 2 * hidden, true};
        tensors_[{i, name + std::string(".bias")}] = {layer.inner_bias + first, {inner}, DType::kFloat32, 2, true};
      }
    }
    layer.out_norm = norm(i, "out.", hidden);
    if (model_.int8) {
      layer.qkv_norm = norm(i, "query.", hidden);
      layer.inner_norm = norm(i, "inner.", hidden);
    }
    if (convolves) {
      const size_t taps = model_.attention_of(i).taps;
      layer.taps = arena.take<float>(taps * hidden);
      add(i, "taps.weight", layer.taps, {taps, hidden}, DType::kFloat32);
      layer.taps_bias = vector(i, "taps.bias", hidden);
    }
    if (model_.qk_norm && !convolves) {
      layer.query_norm = vector(i, "query_norm.gamma", heads.head_size);
      layer.key_norm = vector(i, "key_norm.gamma", heads.head_size);
    }
    if (model_.sublayer_norms) {
      layer.attention_sublayer = vector(i, "attention_sublayer.gamma", hidden);
      layer.out_sublayer = vector(i, "out_sublayer.gamma", hidden);
    }
    if (inputs > 0) {
      float* none = nullptr;
      linear("input", inputs, hidden, layer.input_weight, none, layer.input_bias);
      linear("input_gate", inputs, hidden, layer.input_gate_weight, none, layer.input_gate_bias);
      linear("input_dense", hidden, inputs, layer.input_dense_weight, none, layer.input_dense_bias);
      layer.input_sublayer = vector(i, "input_sublayer.gamma", hidden);
      layer.input_divisors = vector(i, "input_divisors", hidden);
    }
    const auto distances = [&](bool exists, const char* name) {
      return exists ? matrix(i, name, model_.distance_rows, attention, dtype) : nullptr;
    };
    layer.distance_keys = distances(model_.distance_keys, "distance_keys");
    layer.distance_queries = distances(model_.distance_queries, "distance_queries");
  }
  if (model_.embedding > 0) {
    projection_weight_ = matrix(-1, "projection.weight", hidden, embedding, dtype);
    projection_bias_ = vector(-1, "projection.bias", hidden);
  }
  if (inputs > 0) inputs_norm_ = vector(-1, "inputs.gamma", inputs);
  if (model_.pre_norm) last_norm_ = norm(-1, "last.", hidden);
  angles_.clear();
  const size_t positions = model_.positions;
  for (const int columns : model_.angle_tables()) {
    float2* const table = arena.take<float2>(positions * columns);
    add(int(angles_.size()), "angles", table, {positions, size_t(columns), 2}, DType::kFloat32);
    angles_.push_back(table);
  }
  if (model_.relative) {
    relative_ = arena.take<float>(size_t(model_.heads) * 2 * model_.reach());
    add(-1, "relative", relative_, {size_t(model_.heads), 2 * positions - 1}, DType::kFloat32);
  }
  if (model_.distance_rows > 0) {
    distances_ = arena.take<int16_t>(2 * positions - 1);
    add(-1, "distances", distances_, {2 * positions - 1}, DType::kFloat32);
  }
  lay_out_heads(arena);
  bytes = arena.used();
}

void Weights::lay_out_heads(Arena& arena) {
  const TaskHeads& heads = model_.task_heads;
  const size_t hidden = model_.hidden;
  const auto vector = [&](int index, const std::string& name, const TensorShape& shape) {
    float* const to = arena.take<float>(elements_of(shape));
    tensors_[{index, name}] = {to, shape, DType::kFloat32};
    return to;
  };
  const auto layers = [&](const std::string& name, const std::vector<DenseShape>& shapes, std::vector<DenseLayer>& to) {
    to.clear();
    for (const DenseShape& shape : shapes) {
      const int index = int(to.size());
      const size_t in = shape.in, out = shape.out, pitch = dense_pitch(shape.in);
      float* const weight = arena.take<float>(out * pitch);
      tensors_[{index, name + ".weight"}] = {weight, {out, in}, DType::kFloat32, pitch};
      to.push_back({shape, weight, vector(index, name + ".bias", {out})});
    }
  };
  layers("dense", heads.dense, heads_.dense);
  layers("classifier", heads.classifier, heads_.classifier);
  heads_.multi.clear();
  for (const DenseShape& shape : heads.multi) {
    const int index = int(heads_.multi.size());
    const size_t in = shape.in, out = shape.out;
    uint8_t* const weight = arena.take(out * in * bytes_of(model_.dtype));
    tensors_[{index, "multi.weight"}] = {weight, {out, in}, model_.dtype};
    heads_.multi.push_back({shape, weight, vector(index, "multi.bias", {out})});
  }
  if (heads.token_norm) {
    const float* const gamma = vector(-1, "multi.gamma", {hidden});
    heads_.multi_norm = {gamma, vector(-1, "multi.beta", {hidden})};
  }
  if (heads.token_weights) {
    heads_.token_weight = vector(-1, "token_weights.weight", {1, hidden});
    heads_.token_bias = vector(-1, "token_weights.bias", {1});
  }
  if (!heads.splade) return;
  const auto matrix = [&](const std::string& name, size_t rows) {
    uint8_t* const to = arena.take(rows * hidden * bytes_of(model_.dtype));
    tensors_[{-1, name}] = {to, {rows, hidden}, model_.dtype};
    return to;
  };
  const size_t vocabulary = model_.vocabulary;
  heads_.splade.transform = matrix("splade.transform.weight", hidden);
  heads_.splade.transform_bias = vector(-1, "splade.transform.bias", {hidden});
  heads_.splade.gamma = vector(-1, "splade.transform.gamma", {hidden});
  heads_.splade.beta = vector(-1, "splade.transform.beta", {hidden});
  heads_.splade.decoder_bias = vector(-1, "splade.decoder.bias", {vocabulary});
  heads_.splade.decoder =
      heads.splade->tied ? const_cast<void*>(tables_.word) : matrix("splade.decoder.weight", vocabulary);
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
    case NormKind::kInputs:
      return {inputs_norm_, nullptr};
    case NormKind::kInputSublayer:
      return {layer(name.layer).input_sublayer, nullptr};
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
  const int hidden = model_.hidden, inputs = model_.layer_inputs;
  if (kind == Matrix::kProjection) return {projection_weight_, projection_bias_, hidden, model_.embedding, nullptr};
  const LayerWeights& w = layer(layer_index);
  const float* const exact =
      exact_.bytes() == 0 ? nullptr : exact_.as<float>() + model_.stored(layer_index) * exact_count();
  switch (kind) {
    case Matrix::kQkv:
      return {w.qkv_weight, w.qkv_bias, model_.qkv_columns(layer_index), hidden, exact, w.qkv_scale};
    case Matrix::kAttentionOut:
      return {w.attention_weight, w.attention_bias, hidden, model_.context_columns(layer_index), nullptr,
              w.attention_scale};
    case Matrix::kInner:
      return {w.inner_weight,
              w.inner_bias,
              inner_rows(),
              hidden,
              exact == nullptr ? nullptr : exact + size_t(model_.qkv_columns(layer_index)) * hidden,
              w.inner_scale};
    case Matrix::kInput:
      return {w.input_weight, w.input_bias, inputs, hidden};
    case Matrix::kInputGate:
      return {w.input_gate_weight, w.input_gate_bias, inputs, hidden};
    case Matrix::kInputDense:
      return {w.input_dense_weight, w.input_dense_bias, hidden, inputs};
    default:
      return {w.out_weight, w.out_bias, hidden, model_.inner, nullptr, w.out_scale};
  }
}

Status Weights::split_gammas(const Stream& stream) {
  for (int i = 0; i < int(layers_.size()); ++i) {
    const LayerWeights& w = layers_[i];
    const int qkv = model_.qkv_columns(i);
    for (const auto& [weight, norm, rows] :
         {std::tuple(w.qkv_weight, w.attention_norm, qkv), std::tuple(w.inner_weight, w.out_norm, inner_rows())}) {
      EMBERT_TRY(split_gamma(model_.dtype, weight, const_cast<float*>(norm.gamma), rows, model_.hidden, stream));
    }
  }
  return {};
}

}  // namespace embert
