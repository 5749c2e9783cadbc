// The shape of a tensor that is loaded.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "common/status.h"

namespace embert {

using TensorShape = std::vector<size_t>;  // [rows, columns] or [elements]

inline size_t elements_of(const TensorShape& shape) {
  size_t count = 1;
  for (const size_t size : shape) count *= size;
  return count;
}

// Returns an error unless the tensor has this shape.
inline Status check_shape(const std::string& name, const TensorShape& shape, const TensorShape& expected) {
  if (shape == expected) return {};
  const auto written = [](const TensorShape& sizes) {
    std::string all;
    for (const size_t size : sizes) all += (all.empty() ? "[" : ", ") + std::to_string(size);
    return all + "]";
  };
  return Status::refused(name, " has shape ", written(shape), ", expected ", written(expected));
}

}  // namespace embert
