// The storage types of weights and activations.
#pragma once

namespace embert {

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3 };
inline int bytes_of(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kInt8 ? 1 : 2;
}

}  // namespace embert
