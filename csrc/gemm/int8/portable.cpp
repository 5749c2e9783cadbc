#include "gemm/int8/portable.h"

#include <algorithm>
#include <string>
#include <utility>

#include "gemm/int8/rescale.h"

namespace embert {
namespace {

class PortableInt8 final : public Linear {
 public:
  PortableInt8(const LinearWeights& weights, std::unique_ptr<IntegerProduct> product, int32_t* sums)
      : weights_(weights), product_(std::move(product)), sums_(sums) {}

  Status run(const RowView& x, const RowView& residual, int rows, void* y, float2* y_stats, int& y_splits,
             const Stream& stream) override {
    if (rows == 0) return {};
    EMBERT_TRY(check_operands(x, residual, y, y_stats));
    EMBERT_TRY(check_residual_int8(weights_, residual, y_stats));
    EMBERT_TRY(check_input_int8(weights_, x));
    if (x.maxima != nullptr) return Status::refused("portable int8: x comes in blocks");
    const QuantizedRows& from = weights_.quantized;
    if (x.data != nullptr && weights_.block > 0)
      EMBERT_TRY(quantize_block_rows(DType::kFloat16, x.data, rows, weights_.k, weights_.block, from, stream));
    else if (x.data != nullptr)
      EMBERT_TRY(quantize_rows(DType::kFloat16, weights_.input_norm.gamma == nullptr ? RowView{x.data} : x,
                               weights_.input_norm, rows, weights_.k, weights_.epsilon, from, stream));
    y_splits = 1;
    // Pieces of equal size, as few as fit.
    const int pieces = (rows + most_rows_ - 1) / most_rows_;
    const int piece = whole_groups((rows + pieces - 1) / pieces);
    for (int first = 0; first < rows; first += piece) {
      const int count = std::min(piece, rows - first);
      EMBERT_TRY(product_->run(from.data + size_t(first) * weights_.k, whole_groups(count), sums_, stream));
      EMBERT_TRY(rescale(residual, first, count, y, y_stats, stream));
    }
    return {};
  }

 private:
  static int whole_groups(int rows) { return (rows + kIntegerRows - 1) / kIntegerRows * kIntegerRows; }

  Status rescale(const RowView& residual, int first, int count, void* y, float2* y_stats, const Stream& stream) const {
    const size_t row = size_t(weights_.n) * 2, groups = (weights_.n + kStatColumns - 1) / kStatColumns;
    const IntegerSums of{sums_, weights_.quantized.scales + first, weights_.scales, weights_.bias, count, weights_.n};
    void* const to = static_cast<uint8_t*>(y) + first * row;
    if (residual.data == nullptr) return rescale_rows(of, weights_.activation, to, stream);
    const RowView its{static_cast<const uint8_t*>(residual.data) + first * row,
                      residual.stats + first * groups * residual.splits, residual.splits};
    return rescale_onto_residual(of, its, weights_.residual_norm, weights_.epsilon, to, y_stats + first * groups,
                                 stream);
  }

  LinearWeights weights_;
  std::unique_ptr<IntegerProduct> product_;
  int32_t* sums_;
  int most_rows_ = rows_at_once(weights_.n);
};

}  // namespace

Status check_portable_int8(DType dtype, const LinearWeights& weights) {
  if (dtype != DType::kFloat16) return Status::refused("portable int8: rows must be in float16");
  if (weights.pitch != 0 || weights.gated || weights.rope != nullptr || weights.prescaled_rows ||
      weights.activation == Activation::kSilu)
    return Status::refused("portable int8: gates, SiLU, RoPE columns, pitches and gammas in rows are for 16 bits");
  if (!quantize_takes(weights.k, weights.input_norm.gamma != nullptr) || weights.n < 8 || weights.n % 8 != 0 ||
      rows_at_once(weights.n) == 0)
    return Status::refused("portable int8: " + std::to_string(weights.k) + " to " + std::to_string(weights.n) +
                           " columns");
  if (weights.residual_norm.gamma != nullptr &&
      (weights.activation != Activation::kNone || weights.n > kMaxStatColumns))
    return Status::refused("portable int8: a residual and an activation, or over 1024 columns");
  return {};
}

std::unique_ptr<Linear> make_portable_int8(const LinearWeights& weights, std::unique_ptr<IntegerProduct> product,
                                           int32_t* sums) {
  return std::make_unique<PortableInt8>(weights, std::move(product), sums);
}

}  // namespace embert
