#include "model/weights.h"

#include <algorithm>
#include <cmath>

#include "elementwise/elementwise.h"

namespace embert {
namespace {

const char* const kLayerNames[] = {"query.weight",    "query.bias",     "key.weight",       "key.bias",
                                   "value.weight",    "value.bias",     "attention.weight", "attention.bias",
                                   "attention.gamma", "attention.beta", "inner.weight",     "inner.bias",
                                   "out.weight",      "out.bias",       "out.gamma",        "out.beta"};

std::string called(const std::string& name, int layer) {
  return layer < 0 ? name : name + " of layer " + std::to_string(layer);
}

std::string written(const TensorShape& shape) {
  std::string all = "[";
  for (size_t i = 0; i < shape.size(); ++i) all += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return all + "]";
}

size_t elements_of(const TensorShape& shape) {
  size_t count = 1;
  for (const size_t size : shape) count *= size;
  return count;
}

}  // namespace

void Weights::carve(uint8_t* base, size_t& bytes) {
  Carver carver(base);
  const size_t size = bytes_of(shape_.dtype);
  const size_t hidden = shape_.hidden, inner = shape_.inner;
  const auto matrix = [&](size_t rows, size_t columns) { return carver.take(rows * columns * size); };
  const auto vector = [&](size_t count) { return reinterpret_cast<float*>(carver.take(count * sizeof(float))); };
  tables_.word = matrix(shape_.vocabulary, hidden);
  tables_.position = matrix(shape_.position_rows(), hidden);
  tables_.type = matrix(shape_.types, hidden);
  tables_.norm = {vector(hidden), vector(hidden)};
  if (shape_.types == 0) tables_.type = nullptr;
  layers_.resize(shape_.layers);
  for (LayerWeights& layer : layers_) {
    layer.qkv_weight = matrix(3 * hidden, hidden);
    layer.qkv_bias = vector(3 * hidden);
    layer.attention_weight = matrix(hidden, hidden);
    layer.attention_bias = vector(hidden);
    layer.attention_norm = {vector(hidden), vector(hidden)};
    layer.inner_weight = matrix(inner, hidden);
    layer.inner_bias = vector(inner);
    layer.out_weight = matrix(hidden, inner);
    layer.out_bias = vector(hidden);
    layer.out_norm = {vector(hidden), vector(hidden)};
  }
  if (shape_.relative) relative_ = reinterpret_cast<float*>(carver.take(size_t(shape_.heads) * 2 * shape_.reach() * 4));
  heads_.carve(carver, shape_.task_heads, shape_.hidden, shape_.dtype);
  bytes = carver.used();
}

Status Weights::allocate() {
  size_t bytes = 0;
  carve(nullptr, bytes);
  EMBERT_TRY(storage_.allocate(bytes));
  carve(storage_.as(), bytes);
  const size_t largest =
      std::max({size_t(shape_.vocabulary), size_t(shape_.positions), size_t(shape_.inner)}) * shape_.hidden;
  return conversion_.allocate(std::max(largest, heads_.largest()) * 4);
}

Status Weights::find(const std::string& name, int layer, WeightPlace& place) const {
  if (heads_.find(name, layer, place)) return {};
  const size_t hidden = shape_.hidden, inner = shape_.inner;
  const auto matrix = [&](const char* of_name, const void* base, size_t rows, size_t columns, size_t before = 0) {
    if (name != of_name) return false;
    auto* const first = static_cast<uint8_t*>(const_cast<void*>(base));
    place = {first + before * rows * columns * bytes_of(shape_.dtype), {rows, columns}, shape_.dtype};
    return base != nullptr;
  };
  const auto vector = [&](const char* of_name, const float* to, size_t count) {
    if (name != of_name) return false;
    place = {const_cast<float*>(to), {count}, DType::kFloat32};
    return true;
  };
  bool found = false;
  if (layer < 0) {
    found = matrix("word", tables_.word, shape_.vocabulary, hidden) ||
            matrix("position", tables_.position, shape_.positions, hidden) ||
            (shape_.padding && matrix("padding", tables_.position, 1, hidden, shape_.positions)) ||
            matrix("type", tables_.type, shape_.types, hidden) || vector("gamma", tables_.norm.gamma, hidden) ||
            vector("beta", tables_.norm.beta, hidden);
  } else if (layer < shape_.layers) {
    const LayerWeights& w = layers_[layer];
    found = matrix("query.weight", w.qkv_weight, hidden, hidden) ||
            matrix("key.weight", w.qkv_weight, hidden, hidden, 1) ||
            matrix("value.weight", w.qkv_weight, hidden, hidden, 2) || vector("query.bias", w.qkv_bias, hidden) ||
            vector("key.bias", w.qkv_bias + hidden, hidden) || vector("value.bias", w.qkv_bias + 2 * hidden, hidden) ||
            matrix("attention.weight", w.attention_weight, hidden, hidden) ||
            vector("attention.bias", w.attention_bias, hidden) ||
            vector("attention.gamma", w.attention_norm.gamma, hidden) ||
            vector("attention.beta", w.attention_norm.beta, hidden) ||
            matrix("inner.weight", w.inner_weight, inner, hidden) || vector("inner.bias", w.inner_bias, inner) ||
            matrix("out.weight", w.out_weight, hidden, inner) || vector("out.bias", w.out_bias, hidden) ||
            vector("out.gamma", w.out_norm.gamma, hidden) || vector("out.beta", w.out_norm.beta, hidden);
  }
  if (found) return {};
  return Status::refused("this model has no weight " + called(name, layer));
}

Status Weights::exact_place(const std::string& name, int layer, DType stored, float*& to) {
  const char* const names[] = {"query.weight", "key.weight", "value.weight", "inner.weight"};
  const auto* const at = std::find(std::begin(names), std::end(names), name);
  const bool is_matrix = at != std::end(names);
  const bool is_gamma = name == "gamma" || name == "attention.gamma" || name == "out.gamma";
  if (!keeps_exact_ || !(is_matrix || is_gamma)) return {};
  // BF16 counts as exact in FP16: what is below 2⁻¹⁷ loses at most 2⁻²⁵, and a tensor to which that matters, or with an
  // element above 65 504, is not loaded as FP16 (engine/encoders/float16_range.py).
  if (stored != shape_.dtype && !(stored == DType::kBFloat16 && shape_.dtype == DType::kFloat16)) ++rounded_;
  if (is_gamma) return {};
  if (exact_.bytes() == 0) EMBERT_TRY(exact_.allocate(exact_count() * shape_.layers * sizeof(float)));
  const size_t matrix = size_t(shape_.hidden) * shape_.hidden;
  to = exact_.as<float>() + layer * exact_count() + (at - names) * matrix;
  return {};
}

Status Weights::upload(const void* host, size_t count, DType stored, void* to, DType dtype, const Stream& stream) {
  void* const from = stored == dtype ? to : conversion_.as();
  EMBERT_CUDA(cudaMemcpyAsync(from, host, count * bytes_of(stored), cudaMemcpyHostToDevice, stream.handle));
  return stored == dtype ? Status() : convert(stored, from, dtype, to, count, stream);
}

Status Weights::upload_rows(const void* host, DType stored, const WeightPlace& place, const Stream& stream) {
  const size_t rows = place.shape[0], columns = place.shape[1], pitch = place.pitch * bytes_of(place.dtype);
  EMBERT_CUDA(cudaMemsetAsync(place.to, 0, rows * pitch, stream.handle));
  for (size_t row = 0; row < rows; ++row) {
    const auto* const from = static_cast<const uint8_t*>(host) + row * columns * bytes_of(stored);
    EMBERT_TRY(upload(from, columns, stored, static_cast<uint8_t*>(place.to) + row * pitch, place.dtype, stream));
  }
  return {};
}

Status Weights::load(const std::string& name, int layer, const void* host, const TensorShape& shape, DType stored,
                     const Stream& stream) {
  const auto key = std::make_pair(layer, name);
  if (loaded_.count(key) > 0) return Status::refused(called(name, layer) + " was loaded before");
  if (name == "relative" && layer < 0 && shape_.relative) {
    EMBERT_TRY(load_relative(host, shape, stored, stream));
    loaded_.insert(key);
    return {};
  }
  WeightPlace place;
  EMBERT_TRY(find(name, layer, place));
  if (shape != place.shape) {
    return Status::refused(called(name, layer) + " has shape " + written(shape) + ", expected " + written(place.shape));
  }
  const size_t count = elements_of(shape);
  if (place.pitch > 0 && place.pitch != shape[1]) {
    EMBERT_TRY(upload_rows(host, stored, place, stream));
    loaded_.insert(key);
    return {};
  }
  float* exact = nullptr;
  EMBERT_TRY(exact_place(name, layer, stored, exact));
  if (exact == nullptr) {
    EMBERT_TRY(upload(host, count, stored, place.to, place.dtype, stream));
  } else {
    EMBERT_TRY(upload(host, count, stored, exact, DType::kFloat32, stream));
    EMBERT_TRY(convert(DType::kFloat32, exact, place.dtype, place.to, count, stream));
  }
  loaded_.insert(key);
  return {};
}

// Distances that only masked scores have are 0. The others are multiplied by √d, because the kernels scale after
// adding.
Status Weights::load_relative(const void* host, const TensorShape& shape, DType stored, const Stream& stream) {
  const int heads = shape_.heads, reach = shape_.reach(), stored_reach = shape_.positions - 1;
  const int row = 2 * stored_reach + 1;
  const TensorShape expected = {size_t(heads), size_t(row)};
  if (shape != expected) {
    return Status::refused("relative has shape " + written(shape) + ", expected " + written(expected));
  }
  if (stored != DType::kFloat32) return Status::refused("relative must be in float32");
  std::vector<float> scores(size_t(heads) * 2 * reach);
  const float scale = float(std::sqrt(double(shape_.head_size())));
  for (int head = 0; head < heads; ++head) {
    const float* const from = static_cast<const float*>(host) + size_t(head) * row;
    float* const to = scores.data() + size_t(2 * head + 1) * reach - stored_reach;
    for (int i = 0; i < row; ++i) to[i] = from[i] * scale;
  }
  EMBERT_CUDA(cudaMemcpyAsync(relative_, scores.data(), scores.size() * 4, cudaMemcpyHostToDevice, stream.handle));
  EMBERT_CUDA(cudaStreamSynchronize(stream.handle));
  return {};
}

Status Weights::complete() {
  std::vector<std::pair<int, std::string>> expected = {{-1, "word"}, {-1, "position"}, {-1, "gamma"}, {-1, "beta"}};
  if (shape_.padding) expected.emplace_back(-1, "padding");
  if (shape_.types > 0) expected.emplace_back(-1, "type");
  if (shape_.relative) expected.emplace_back(-1, "relative");
  for (int layer = 0; layer < shape_.layers; ++layer) {
    for (const char* const name : kLayerNames) expected.emplace_back(layer, name);
  }
  for (const auto& each : heads_.names()) expected.push_back(each);
  for (const auto& [layer, name] : expected) {
    if (loaded_.count({layer, name}) > 0) continue;
    return Status::refused(called(name, layer) + " was not loaded: of " + std::to_string(expected.size()) +
                           " weights there are " + std::to_string(loaded_.size()));
  }
  conversion_.release();
  return {};
}

}  // namespace embert
