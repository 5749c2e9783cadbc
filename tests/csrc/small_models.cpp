#include <algorithm>

#include "recording_device.h"

using namespace embert;

void check(const Status& status) {
  if (status.ok()) return;
  std::printf("refused %s\n", status.message().c_str());
  std::exit(0);
}

EncoderConfig model_of(Kind kind) {
  EncoderConfig model;
  model.hidden = kHidden;
  model.layers = kLayers;
  model.heads = kHeads;
  model.inner = kInner;
  model.vocabulary = kVocabulary;
  model.positions = kPositions;
  model.types = 1;
  const auto rotate = [&](int window, int tables) {
    model.position_table = false;
    model.gated = true;
    for (int i = 0; i < kLayers; ++i)
      model.attention.push_back({i % 3 == 0 ? 0 : window, kRotaryDim, i % 3 == 0 ? 0 : tables - 1});
  };
  switch (kind) {
    case Kind::kRelative:
      model.relative = true;
      break;
    case Kind::kModern:
      rotate(40, 2);
      model.pre_norm = true;
      model.first_norm = false;
      break;
    case Kind::kNomic:
      rotate(0, 1);
      model.activation = Activation::kSilu;
      break;
    case Kind::kGte:
      rotate(0, 1);
      break;
    case Kind::kAlbert:
      model.shared.assign(kLayers, 0);
      [[fallthrough]];
    case Kind::kElectra:
      model.embedding = 128;
      break;
    case Kind::kJina:
      model.position_table = false;
      model.gated = model.relative = true;
      break;
    default:
      break;
  }
  return model;
}

void load(Encoder& encoder, const std::string& without) {
  for (const auto& [key, view] : encoder.weights().tensors()) {
    const auto& [layer, name] = key;
    const DType stored = view.dtype == DType::kInt8 ? DType::kInt8 : DType::kFloat32;
    const std::vector<float> zeros(elements_of(view.shape));
    if (name != without) check(encoder.load(name, layer, zeros.data(), view.shape, stored));
  }
}

Batch::Batch(const std::vector<int>& lengths) {
  for (const int length : lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
  ids.assign(cu_seqlens.back(), 5);
  view.tokens = cu_seqlens.back();
  view.sequences = int(lengths.size());
  view.ids = ids.data();
  view.cu_seqlens = cu_seqlens.data();
}
