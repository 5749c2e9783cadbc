// Routed feed-forward networks by any provider's GEMMs: every expert multiplies all rows, and only the outputs that a
// row is routed to are read.

#include <vector>

#include "common/memory.h"
#include "gemm/gemm.h"

namespace embert {
namespace {

class DenseExperts final : public Experts {
 public:
  Status prepare(GemmProvider& provider, const ExpertWeights& weights, DType dtype, const Stream& stream) {
    row_bytes_ = size_t(weights.hidden) * bytes_of(dtype);
    const size_t matrix = row_bytes_ * weights.columns;
    EMBERT_TRY(zeros_.allocate(std::max(weights.hidden, weights.columns) * sizeof(float)));
    EMBERT_CUDA(cudaMemsetAsync(zeros_.as(), 0, zeros_.bytes(), stream.handle));
    const auto add = [&](uint8_t* weight, int out, int in, Activation activation) {
      LinearWeights linear;
      linear.weight = weight;
      linear.bias = zeros_.as<float>();
      linear.n = out, linear.k = in;
      linear.activation = activation;
      return provider.prepare(linear, stream, linears_.emplace_back());
    };
    for (int expert = 0; expert < weights.count; ++expert) {
      EMBERT_TRY(add(weights.inner + expert * matrix, weights.columns, weights.hidden, weights.activation));
      EMBERT_TRY(add(weights.out + expert * matrix, weights.hidden, weights.columns, Activation::kNone));
    }
    return {};
  }

  Status run(const void* x, int rows, const RoutedRows& /* routed */, void* inner, void* y, Stream& stream) override {
    auto* to = static_cast<uint8_t*>(y);
    int none = 0;
    for (size_t i = 0; i < linears_.size(); i += 2, to += rows * row_bytes_) {
      EMBERT_TRY(linears_[i]->run({x}, {}, rows, inner, nullptr, none, stream.alternate_direction()));
      EMBERT_TRY(linears_[i + 1]->run({inner}, {}, rows, to, nullptr, none, stream.alternate_direction()));
    }
    return {};
  }

 private:
  DeviceBuffer zeros_;
  std::vector<std::unique_ptr<Linear>> linears_;  // inner and out of each expert
  size_t row_bytes_ = 0;
};

}  // namespace

Status make_dense_experts(GemmProvider& gemm, DType dtype, const ExpertWeights& weights, const Stream& stream,
                          std::unique_ptr<Experts>& experts) {
  auto dense = std::make_unique<DenseExperts>();
  EMBERT_TRY(dense->prepare(gemm, weights, dtype, stream));
  experts = std::move(dense);
  return {};
}

}  // namespace embert
