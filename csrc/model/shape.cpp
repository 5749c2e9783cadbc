#include "model/shape.h"

#include <string>

#include "attention/attention.h"
#include "norm/layernorm.h"

namespace embert {
namespace {

constexpr int kMostHeadColumns = 65536;  // of a linear layer of a head
constexpr int kMostMultiColumns = 8192;

Status refuse(const std::string& what) {
  return Status::refused("the CUDA encoder cannot run " + what);
}

}  // namespace

Status ModelShape::check() const {
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
  return check_heads();
}

Status ModelShape::check_heads() const {
  const auto chain = [&](const char* name, const std::vector<DenseShape>& layers) -> Status {
    int columns = hidden;
    for (const DenseShape& layer : layers) {
      if (layer.in != columns || layer.out < 1 || layer.out > kMostHeadColumns)
        return refuse(std::string(name) + " of " + std::to_string(layer.in) + " columns to " +
                      std::to_string(layer.out) + " after " + std::to_string(columns) + " columns; at most " +
                      std::to_string(kMostHeadColumns) + " are taken");
      columns = layer.out;
    }
    return {};
  };
  if (task_heads.token_weights && task_heads.splade) return refuse("token weights beside a SPLADE head");
  EMBERT_TRY(chain("a Dense module", task_heads.dense));
  EMBERT_TRY(chain("a classification layer", task_heads.classifier));
  EMBERT_TRY(chain("a multi-vector layer", task_heads.multi));
  for (const DenseShape& layer : task_heads.multi) {
    if (layer.out % 8 != 0 || layer.out > kMostMultiColumns)
      return refuse("a multi-vector layer of " + std::to_string(layer.out) +
                    " columns: it must be a multiple of 8 of at most " + std::to_string(kMostMultiColumns));
    if (layer.activation == HeadActivation::kTanh || layer.activation == HeadActivation::kSigmoid)
      return refuse("a multi-vector layer with tanh or sigmoid");
  }
  return {};
}

}  // namespace embert
