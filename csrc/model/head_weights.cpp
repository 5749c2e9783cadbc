#include "model/head_weights.h"

#include <algorithm>

namespace embert {

void HeadWeights::carve(Carver& carver, const TaskHeads& heads, int hidden, DType dtype) {
  heads_ = heads;
  hidden_ = hidden;
  dtype_ = dtype;
  const auto vector = [&](size_t count) { return reinterpret_cast<float*>(carver.take(count * sizeof(float))); };
  const auto layers = [&](const std::vector<DenseShape>& shapes, std::vector<DenseLayer>& made) {
    made.clear();
    for (const DenseShape& shape : shapes) {
      const float* const weight = vector(size_t(shape.out) * dense_pitch(shape.in));
      made.push_back({shape, weight, vector(shape.out)});
    }
  };
  layers(heads.dense, dense_);
  layers(heads.classifier, classifier_);
  if (heads.multi > 0) {
    multi_weight_ = carver.take(size_t(heads.multi) * hidden * bytes_of(dtype));
    multi_bias_ = vector(heads.multi);
  }
  if (heads.token_weights) {
    token_weight_ = vector(hidden);
    token_bias_ = vector(1);
  }
}

bool HeadWeights::find(const std::string& name, int index, WeightPlace& place) const {
  const auto in_layers = [&](const std::string& head, const std::vector<DenseLayer>& layers) {
    if (index < 0 || index >= int(layers.size())) return false;
    const DenseLayer& layer = layers[index];
    const size_t in = layer.shape.in, out = layer.shape.out;
    if (name == head + ".weight") {
      place = {const_cast<float*>(layer.weight), {out, in}, DType::kFloat32, size_t(dense_pitch(layer.shape.in))};
    } else if (name == head + ".bias") {
      place = {const_cast<float*>(layer.bias), {out}, DType::kFloat32};
    } else {
      return false;
    }
    return true;
  };
  if (in_layers("dense", dense_) || in_layers("classifier", classifier_)) return true;
  if (index >= 0) return false;
  const size_t hidden = hidden_, multi = heads_.multi;
  if (name == "multi.weight") place = {multi_weight_, {multi, hidden}, dtype_};
  if (name == "multi.bias") place = {multi_bias_, {multi}, DType::kFloat32};
  if (name == "token_weights.weight") place = {token_weight_, {1, hidden}, DType::kFloat32};
  if (name == "token_weights.bias") place = {token_bias_, {1}, DType::kFloat32};
  return place.to != nullptr;
}

std::vector<std::pair<int, std::string>> HeadWeights::names() const {
  std::vector<std::pair<int, std::string>> all;
  const auto add = [&](int index, const std::string& head) {
    all.emplace_back(index, head + ".weight");
    all.emplace_back(index, head + ".bias");
  };
  for (size_t i = 0; i < dense_.size(); ++i) add(int(i), "dense");
  for (size_t i = 0; i < classifier_.size(); ++i) add(int(i), "classifier");
  if (heads_.multi > 0) add(-1, "multi");
  if (heads_.token_weights) add(-1, "token_weights");
  return all;
}

size_t HeadWeights::largest() const {
  size_t largest = std::max(size_t(heads_.multi), size_t(heads_.token_weights)) * hidden_;
  for (const auto* const layers : {&dense_, &classifier_}) {
    for (const DenseLayer& layer : *layers) largest = std::max(largest, size_t(layer.shape.out) * layer.shape.in);
  }
  return largest;
}

}  // namespace embert
