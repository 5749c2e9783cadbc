// y[rows, out] = activation(x[rows, in] · W[out, in]ᵀ + bias (+ residual)): the one matrix product that an encoder
// needs.
//
// There are two providers: cuBLASLt for every device and type, and our own Hopper kernels, which also apply LayerNorms
// (EPILOGUES.md). With our own kernels an output row depends on its own row and the weights alone, bit for bit,
// whatever `rows` is: no split of K varies with the number of rows. cuBLASLt is asked not to split K either, but does
// not promise the order in which a block adds. Its rows are equal up to rounding; in 8 bits, whose sums are exact, to
// the bit, and with either provider LayerNorms are then part of products.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "common/dtype.h"
#include "common/launch.h"
#include "gemm/text_maxima.h"
#include "ops/activation.h"
#include "ops/norm.h"
#include "ops/quantize.h"
#include "ops/rope.h"

namespace embert {

struct LinearWeights {
  void* weight = nullptr;       // [out, in]; rewritten where input_norm's gamma is folded into it
  const float* bias = nullptr;  // [out]
  int n = 0, k = 0;
  Activation activation = Activation::kNone;
  Norm input_norm, residual_norm;  // only where the provider folds
  float epsilon = 0.0f;            // of both
  // Where a LayerNorm's gamma goes (EPILOGUES.md). False: into the weights of the product after it, which are then
  // rounded from `exact`. True: into its rows, which are stored multiplied with it; no weight changes.
  bool prescaled_rows = false;
  const float* exact = nullptr;       // [out, in]: `weight` in FP32. Only while it is prepared.
  const float* next_gamma = nullptr;  // [out]: with prescaled_rows and a residual, what y is multiplied with; null: 1
  // The weights of a later product, which a provider may bring to the L2 cache while this product runs.
  const void* ahead = nullptr;
  size_t ahead_bytes = 0;
  int pitch = 0;  // elements from a row of y to the next; 0: out. cuBLASLt alone takes another.
  // weight, exact and bias have 2·out rows: gate, value, gate, value, …; y[rows, out] = activation(gate)·value. `out`
  // counts the columns of y. Only where the provider fuses_gate; never with a residual.
  bool gated = false;
  // Columns of y that are turned before they are rounded, after the bias; null: none. Only where the provider
  // fuses_rope; read while the product is prepared, and copied.
  const RopeColumns* rope = nullptr;
  // Not null: W is int8, rotated and rounded (ops/quantize.h), with a scale for each of its rows. Rows of x are
  // quantized on the way, after their LayerNorm, into `quantized`; without x, what is there is multiplied. With an
  // activation y is a quarter of it (ops/activation_pair.cuh). Only where the provider has_int8.
  const float* scales = nullptr;  // [out]
  // Not 0: x is rounded in blocks of so many columns, and W is rotated for these (ops/quantize.h).
  int block = 0;
  // Memory that products one after another share: the most rows, in whole groups of 32, and the widest `in`.
  QuantizedRows quantized = {};
};

// A tile writes its part of y and of y's sums while other tiles still read x, the residual and their sums.
inline Status check_operands(const RowView& x, const RowView& residual, const void* y, const float2* y_stats) {
  if (y == x.data) return Status::refused("a product cannot write over its own input");
  if (y_stats == nullptr) return {};
  if (y == residual.data || y_stats == x.stats || y_stats == residual.stats)
    return Status::refused("a product that leaves sums cannot write over rows or sums that it reads");
  return {};
}

// In 8 bits a residual comes with its LayerNorm and its sums, and y leaves sums; or there is none of these.
inline Status check_residual_int8(const LinearWeights& of, const RowView& residual, const float2* y_stats) {
  const bool adds = of.residual_norm.gamma != nullptr;
  if (adds == (residual.data != nullptr) && adds == (residual.stats != nullptr) && adds == (y_stats != nullptr))
    return {};
  return Status::refused("int8: a residual comes with its LayerNorm and leaves sums, or there is none");
}

// Its columns are balanced with the LayerNorm's, so rows that come without their sums are not what W expects.
inline Status check_input_int8(const LinearWeights& of, const RowView& x) {
  if (x.data == nullptr || of.input_norm.gamma == nullptr || x.stats != nullptr) return {};
  return Status::refused("int8: x comes without sums, but has a LayerNorm");
}

class Linear {
 public:
  virtual ~Linear() = default;
  // residual: [rows, out] or none, added before rounding; never with an activation. y_stats: null, or where the sums of
  // y's rows go; `y_splits` is then set. y may be the residual where y_stats is null, but never x (check_operands).
  //
  // A residual without sums is added as it is; residual_norm is then absent, and y's sums are written as ever. So it is
  // in models whose norms come before (pre-norm), where prescaled_rows is never set, because the rows are the residual.
  virtual Status run(const RowView& x, const RowView& residual, int rows, void* y, float2* y_stats, int& y_splits,
                     const Stream& stream) = 0;
  // Whether x may come in blocks (RowView::maxima), where there are so many rows.
  virtual bool takes_blocks(int /* rows */) const { return false; }
};

// The feed-forward part of a layer: y = out(activation(in(x))), with x as the residual.
class FeedForward {
 public:
  virtual ~FeedForward() = default;
  // inner: memory for the activations between the two products, [rows, inner]. y may not be x. The direction of `along`
  // alternates from kernel to kernel.
  virtual Status run(const RowView& x, int rows, void* inner, void* y, float2* y_stats, int& y_splits,
                     Stream& along) = 0;
};

class GemmProvider {
 public:
  virtual ~GemmProvider() = default;
  virtual const char* name() const = 0;
  virtual Status prepare(const LinearWeights& weights, const Stream& stream, std::unique_ptr<Linear>& linear) = 0;
  // Maxima over texts of activation-free products. Leaves `made` empty where the provider has none of its own:
  // make_portable_maxima then makes it of `prepare`.
  virtual Status prepare_maxima(const LinearWeights& /* weights */, const Stream& /* stream */,
                                std::unique_ptr<TextMaxima>& /* made */) {
    return {};
  }
  // Joins two products made by `prepare`: the first has the activation, the second a residual.
  virtual Status join(std::unique_ptr<Linear> in, std::unique_ptr<Linear> out, std::unique_ptr<FeedForward>& joined);
  virtual size_t workspace_bytes() const = 0;
  // Whether the kernels before and after may be chained by programmatic dependent launch.
  virtual bool dependent_launch() const = 0;
  // Whether it applies LayerNorms: Norms in LinearWeights, sums in Rows.
  virtual bool folds() const = 0;
  // What its products do themselves: LinearWeights::rope, LinearWeights::gated. Where they do not,
  // encoder/program.cpp adds a kernel after the product (ops/rope.cu, ops/gate.cu), and neither is set.
  virtual bool fuses_rope() const { return false; }
  virtual bool fuses_gate() const { return false; }
  // Whether it takes weights of 8 bits: LinearWeights::scales. Such products apply LayerNorms, whatever `folds` says.
  virtual bool has_int8() const { return false; }
  // After all calls of `prepare`: refused where a Norm cannot be folded into its weights without loss.
  virtual Status check_folds() const { return {}; }
};

// One product after the other.
class TwoProducts final : public FeedForward {
 public:
  TwoProducts(std::unique_ptr<Linear> in, std::unique_ptr<Linear> out) : in_(std::move(in)), out_(std::move(out)) {}
  Status run(const RowView& x, int rows, void* inner, void* y, float2* y_stats, int& y_splits, Stream& along) override {
    int none = 0;
    EMBERT_TRY(in_->run(x, {}, rows, inner, nullptr, none, along.alternate_direction()));
    return out_->run({inner}, x, rows, y, y_stats, y_splits, along.alternate_direction());
  }

 private:
  std::unique_ptr<Linear> in_, out_;
};

inline Status GemmProvider::join(std::unique_ptr<Linear> in, std::unique_ptr<Linear> out,
                                 std::unique_ptr<FeedForward>& joined) {
  joined = std::make_unique<TwoProducts>(std::move(in), std::move(out));
  return {};
}

// cuBLASLt, loaded on first use. `library`: a file name or path, or empty for the one beside the toolkit.
Status make_cublaslt(DType dtype, const std::string& library, std::unique_ptr<GemmProvider>& provider);

// Our own kernels: sm_90a, 16-bit types.
Status make_hopper(DType dtype, std::unique_ptr<GemmProvider>& provider);

}  // namespace embert
