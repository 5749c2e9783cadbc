// y[rows, out] = activation(x[rows, in] · W[out, in]ᵀ + bias (+ residual)): the GEMM of an encoder.
//
// There are two providers: cuBLASLt for every device, in FP16, BF16 and FP32, and our own Hopper kernels, which
// multiply int8 too and apply LayerNorms (EPILOGUES.md). Our own kernels are batch-invariant: the bits of an output row
// depend only on its own row and the weights, for every `rows`, because no split of K varies with the number of rows.
// cuBLASLt may split K for few rows (cublaslt.cpp), and does not guarantee the order of additions in a block: its rows
// are equal up to rounding.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "common/launch.h"
#include "common/types.h"
#include "ops/elementwise.h"
#include "ops/experts.h"
#include "ops/norm.h"
#include "ops/quantize.h"

namespace embert {

// maxima[text, column]: the largest of max(0, x·Wᵀ + bias) over a text's rows. x·Wᵀ, all rows by all columns, is never
// in memory as a whole (EPILOGUES.md).
//
// Our own Hopper kernel takes the maxima in its epilogue. The portable implementation writes the products of some rows,
// and a second kernel reduces them. NaN counts as the largest number, so that it is visible.

struct LinearWeights;
class GemmProvider;

// Maxima have a row for each text, of whole tiles of columns. Values past the last column are undefined.
constexpr int kMaximaColumns = 128;
inline int maxima_pitch(int columns) {
  return (columns + kMaximaColumns - 1) / kMaximaColumns * kMaximaColumns;
}

// The entry of a row that belongs to no text.
constexpr int kNoText = -1;

// Consecutive texts of a batch, and their rows of x.
struct TextRows {
  const void* x;       // [all_rows, in], of which these texts have `rows` from `first_row` on
  const int* text_of;  // [all_rows], device memory: each row's text, in ascending order without gaps; or kNoText
  int all_rows, first_row, rows;
  int first_text;
};

class TextMaxima {
 public:
  virtual ~TextMaxima() = default;
  // Raises `maxima`, [texts, maxima_pitch(out)], which begins with the first text and must be 0 initially.
  virtual Status run(const TextRows& texts, float* maxima, const Stream& stream) = 0;
  virtual size_t workspace_bytes() const { return 0; }
};

// For every provider, by GEMMs of some rows at a time.
Status make_portable_maxima(GemmProvider& gemm, DType dtype, const LinearWeights& weights, const Stream& stream,
                            std::unique_ptr<TextMaxima>& maxima_gemm);

struct LinearWeights {
  void* weight = nullptr;       // [out, in]; rewritten where input_norm's gamma is folded into it
  const float* bias = nullptr;  // [out]
  int n = 0, k = 0;
  Activation activation = Activation::kNone;
  Norm input_norm, residual_norm;  // only where the provider folds
  float epsilon = 0.0f;            // of both
  bool rms = false;                // input_norm is an RMSNorm, with a beta of zeros
  // The operand that a LayerNorm's gamma is folded into (EPILOGUES.md). False: into the weights of the next GEMM, which
  // are then rounded from `exact`. True: into its rows, which are stored multiplied by it; no weight changes. With
  // `rms` the rows are the residual, too: it is divided by residual_norm's gamma, which is then no norm.
  bool prescaled_rows = false;
  const float* exact = nullptr;       // [out, in]: `weight` in FP32; only during preparation
  const float* next_gamma = nullptr;  // [out]: factor of y with prescaled_rows and a residual; null: 1
  // The weights of a later GEMM, which a provider may prefetch into the L2 cache during this one.
  const void* prefetch_weights = nullptr;
  size_t prefetch_bytes = 0;
  int pitch = 0;  // elements from a row of y to the next; 0: out. Other values: cuBLASLt only.
  // weight, exact and bias have 2·out rows: gate, value, gate, value, …; y[rows, out] = activation(gate)·value. `out`
  // counts the columns of y. Only where the provider fuses_gate; never with a residual.
  bool gated = false;
  // RoPE of columns of y, after the bias and before rounding; null: none. Only where the provider fuses_rope; read
  // while the GEMM is prepared, and copied.
  const RopeColumns* rope = nullptr;
  // Not null: W is int8, rotated and rounded (ops/quantize.h), with a scale for each of its rows. Rows of x are
  // quantized first, after their LayerNorm, into `quantized`; without x, its present content is multiplied. With an
  // activation y is a quarter of it (ops/activation.cuh). Only where the provider has_int8.
  const float* scales = nullptr;  // [out]
  // Not 0: x is quantized in blocks of this many columns, and W is rotated for these (ops/quantize.h).
  int block = 0;
  // Memory that consecutive GEMMs share: the most rows, in whole groups of 32, and the widest `in`.
  QuantizedRows quantized = {};
};

// A tile writes its part of y and of y's row statistics while other tiles still read x, the residual and their
// statistics.
inline Status check_operands(const RowView& x, const RowView& residual, const void* y, const float2* y_stats) {
  if (y == x.data) return Status::refused("a product cannot write over its own input");
  if (y_stats == nullptr) return {};
  if (y == residual.data || y_stats == x.stats || y_stats == residual.stats)
    return Status::refused("a product that leaves sums cannot write over rows or sums that it reads");
  return {};
}

// With int8 a residual comes with its LayerNorm and its row statistics, and y gets statistics; or there is none of
// these.
inline Status check_residual_int8(const LinearWeights& weights, const RowView& residual, const float2* y_stats) {
  const bool has_residual = weights.residual_norm.gamma != nullptr;
  if (has_residual == (residual.data != nullptr) && has_residual == (residual.stats != nullptr) &&
      has_residual == (y_stats != nullptr))
    return {};
  return Status::refused("int8: a residual comes with its LayerNorm and leaves sums, or there is none");
}

// W's columns are balanced with the LayerNorm's, so rows without row statistics do not match W.
inline Status check_input_int8(const LinearWeights& weights, const RowView& x) {
  if (x.data == nullptr || weights.input_norm.gamma == nullptr || x.stats != nullptr) return {};
  return Status::refused("int8: x comes without sums, but has a LayerNorm");
}

class Linear {
 public:
  virtual ~Linear() = default;
  // residual: [rows, out] or none, added before rounding; never with an activation. y_stats: null, or the destination
  // of y's row statistics; `y_splits` is then set. y may be the residual where y_stats is null, but never x
  // (check_operands).
  //
  // A residual without row statistics is added unchanged; residual_norm is then absent, and y's statistics are still
  // written. Pre-norm models use this.
  virtual Status run(const RowView& x, const RowView& residual, int rows, void* y, float2* y_stats, int& y_splits,
                     const Stream& stream) = 0;
  // True if x may come in blocks (RowView::maxima) for this number of rows.
  virtual bool supports_blocks(int /* rows */) const { return false; }
};

// The feed-forward layer: y = out(activation(in(x))), with x as the residual.
class FeedForward {
 public:
  virtual ~FeedForward() = default;
  // inner: memory for the activations between the two products, [rows, inner]. y may not be x. The direction of
  // `stream` alternates from kernel to kernel.
  virtual Status run(const RowView& x, int rows, void* inner, void* y, float2* y_stats, int& y_splits,
                     Stream& stream) = 0;
};

// The matrices of a layer's experts, one expert's below the other's. Single experts have no biases.
struct ExpertWeights {
  uint8_t *inner = nullptr, *out = nullptr;  // [count · columns, hidden], [count · hidden, columns]
  int count = 0, hidden = 0, columns = 0;
  Activation activation = Activation::kNone;
};

class Experts {
 public:
  virtual ~Experts() = default;
  // y: the outputs out(activation(inner(x))) of each row's experts, in the slots that RoutedRows then names.
  virtual Status run(const void* x, int rows, const RoutedRows& routed, void* inner, void* y, Stream& stream) = 0;
};

class GemmProvider {
 public:
  virtual ~GemmProvider() = default;
  virtual const char* name() const = 0;
  virtual Status prepare(const LinearWeights& weights, const Stream& stream, std::unique_ptr<Linear>& linear) = 0;
  // Maxima over texts of GEMMs without activation. Leaves `maxima_gemm` empty where the provider has no kernel for it:
  // make_portable_maxima then builds it from `prepare`.
  virtual Status prepare_maxima(const LinearWeights& /* weights */, const Stream& /* stream */,
                                std::unique_ptr<TextMaxima>& /* maxima_gemm */) {
    return {};
  }
  // Fuses two GEMMs made by `prepare`: the first has the activation, the second a residual.
  virtual Status fuse(std::unique_ptr<Linear> in, std::unique_ptr<Linear> out, std::unique_ptr<FeedForward>& fused);
  // True if it multiplies rows grouped by expert: prepare_experts. `inner` and y then have max_expert_tiles. Otherwise
  // make_dense_experts builds them from `prepare`.
  virtual bool groups_experts() const { return false; }
  virtual Status prepare_experts(const ExpertWeights& /* weights */, const Stream& /* stream */,
                                 std::unique_ptr<Experts>& /* experts */) {
    return {};
  }
  virtual size_t workspace_bytes() const = 0;
  // True if the kernels before and after may be chained by programmatic dependent launch.
  virtual bool dependent_launch() const = 0;
  // True if it applies LayerNorms: Norms in LinearWeights, row statistics in RowView.
  virtual bool folds() const = 0;
  // Ops that its epilogues fuse: LinearWeights::rope, LinearWeights::gated. Otherwise encoder/program.cpp adds a kernel
  // after the GEMM (ops/elementwise.cu), and neither is set.
  virtual bool fuses_rope() const { return false; }
  virtual bool fuses_gate() const { return false; }
  // True if it supports int8 weights: LinearWeights::scales. Such GEMMs apply LayerNorms independently of `folds`.
  virtual bool has_int8() const { return false; }
  // After all calls of `prepare`: returns an error where a Norm cannot be folded into its weights without loss.
  virtual Status check_folds() const { return {}; }
};

// Two GEMMs, one after the other.
class UnfusedFeedForward final : public FeedForward {
 public:
  UnfusedFeedForward(std::unique_ptr<Linear> in, std::unique_ptr<Linear> out)
      : in_(std::move(in)), out_(std::move(out)) {}
  Status run(const RowView& x, int rows, void* inner, void* y, float2* y_stats, int& y_splits,
             Stream& stream) override {
    int none = 0;
    EMBERT_TRY(in_->run(x, {}, rows, inner, nullptr, none, stream.alternate_direction()));
    return out_->run({inner}, x, rows, y, y_stats, y_splits, stream.alternate_direction());
  }

 private:
  std::unique_ptr<Linear> in_, out_;
};

inline Status GemmProvider::fuse(std::unique_ptr<Linear> in, std::unique_ptr<Linear> out,
                                 std::unique_ptr<FeedForward>& fused) {
  fused = std::make_unique<UnfusedFeedForward>(std::move(in), std::move(out));
  return {};
}

// For every provider: each expert multiplies all rows. `inner` has `rows`, and y is [count, rows, hidden].
Status make_dense_experts(GemmProvider& gemm, DType dtype, const ExpertWeights& weights, const Stream& stream,
                          std::unique_ptr<Experts>& experts);

// cuBLASLt, loaded on first use. `library`: a file name or path, or empty for the toolkit's own.
Status make_cublaslt(DType dtype, const std::string& library, std::unique_ptr<GemmProvider>& provider);

// Our own kernels: sm_90a, 16-bit types.
Status make_sm90(DType dtype, std::unique_ptr<GemmProvider>& provider);

}  // namespace embert
