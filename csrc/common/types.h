// The storage types of weights and activations, and the activations of the feed-forward layer.
#pragma once

namespace embert {

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3 };
constexpr int bytes_of(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kInt8 ? 1 : 2;
}

enum class Activation : int { kNone = 0, kGeluErf = 1, kGeluTanh = 2, kRelu = 3, kSilu = 4 };

}  // namespace embert
