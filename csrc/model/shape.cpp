#include "model/shape.h"

#include <string>

#include "attention/attention.h"
#include "norm/layernorm.h"

namespace embert {

Status ModelShape::check() const {
  const auto refuse = [](const std::string& what) { return Status::refused("the CUDA encoder cannot run " + what); };
  if (hidden <= 0 || heads <= 0 || hidden % heads != 0)
    return refuse("hidden size " + std::to_string(hidden) + " with " + std::to_string(heads) + " heads");
  if (!layernorm_takes(dtype, hidden) || hidden % 8 != 0)
    return refuse("hidden size " + std::to_string(hidden) + ": it must be a multiple of 8 of at most " +
                  std::to_string(dtype == DType::kFloat32 ? 1024 : 2048));
  if (!attention_takes(dtype, head_size()))
    return refuse("head size " + std::to_string(head_size()) + ": it must be a multiple of 8 from 8 to 128");
  if (inner <= 0 || inner % 8 != 0)
    return refuse("intermediate size " + std::to_string(inner) + ": it must be a multiple of 8");
  if (layers < 1 || vocabulary < 1 || max_length() < 1 || types < 0)
    return refuse("a model without layers, vocabulary or positions");
  return {};
}

}  // namespace embert
