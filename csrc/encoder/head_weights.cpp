#include "encoder/head_weights.h"

#include <algorithm>
#include <type_traits>

namespace embert {

void HeadWeights::lay_out(Arena& arena, const TaskHeads& heads, int hidden, DType dtype) {
  heads_ = heads;
  hidden_ = hidden;
  dtype_ = dtype;
  const auto vector = [&](size_t count) { return reinterpret_cast<float*>(arena.take(count * sizeof(float))); };
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
