// y[rows, out] = activation(x[rows, in] · W[out, in]ᵀ + bias (+ residual)): the one matrix product an encoder needs.
//
// Behind it: cuBLASLt (every device and type) and our own Hopper kernels, which also take LayerNorms over (see
// ../EPILOGUES.md). An output row of our own kernels depends on its own row, the weights and nothing else, bit for bit,
// whatever `rows` is: no split of K varies with the number of rows. cuBLASLt is asked for the same, no split of K at
// all, but does not promise the order in which a block adds: rows of it are equal up to rounding.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "../kernels/norm.h"
#include "../kernels/shapes.h"
#include "../launch.h"

namespace embert {

struct LinearWeights {
  void* weight = nullptr;       // [out, in]; rewritten where input_norm's gamma goes into it
  const float* bias = nullptr;  // [out]
  int out = 0, in = 0;
  Activation activation = Activation::kNone;
  Norm input_norm, residual_norm;  // only where the provider folds
  float epsilon = 0.0f;            // of both
  // Where a LayerNorm's gamma goes (../EPILOGUES.md): false: into the weights of the product after it, which are then
  // rounded from `exact`. True: into its rows, which come and go multiplied with it, and no weight is touched.
  bool gamma_in_rows = false;
  const float* exact = nullptr;       // [out, in]: `weight` in FP32. Only while it is prepared.
  const float* next_gamma = nullptr;  // [out]: with gamma_in_rows and a residual, what y is multiplied with; null: 1
  // What another product will want soon: brought to the L2 cache while this one is at work, where a provider sees a use
  // in it.
  const void* ahead = nullptr;
  size_t ahead_bytes = 0;
};

// A tile leaves its part of y and of its sums while others still read theirs of x, of the residual's sums, and with
// them of the residual.
inline Status check_places(const Rows& x, const Rows& residual, const void* y, const float2* y_sums) {
  if (y == x.data) return Status::refused("a product cannot write over its own input");
  if (y_sums == nullptr) return {};
  if (y == residual.data || y_sums == x.sums || y_sums == residual.sums)
    return Status::refused("a product that leaves sums cannot write over rows or sums that it reads");
  return {};
}

class Linear {
 public:
  virtual ~Linear() = default;
  // residual: [rows, out] or none, added before rounding; never with an activation. y_sums: null, or where the sums of
  // y's rows go; `y_parts` is then set. y may be the residual where no sums are left; never x (check_places).
  virtual Status run(const Rows& x, const Rows& residual, int rows, void* y, float2* y_sums, int& y_parts,
                     const Stream& stream) = 0;
};

// The feed-forward part of a layer: y = out(activation(in(x))), with x as the residual.
class FeedForward {
 public:
  virtual ~FeedForward() = default;
  // inner: room for the activations between the two, [rows, inner]; y may not be x. Each kernel goes the other way than
  // the one before it on `along`.
  virtual Status run(const Rows& x, int rows, void* inner, void* y, float2* y_sums, int& y_parts, Stream& along) = 0;
};

class GemmProvider {
 public:
  virtual ~GemmProvider() = default;
  virtual const char* name() const = 0;
  virtual Status prepare(const LinearWeights& weights, const Stream& stream, std::unique_ptr<Linear>& linear) = 0;
  // Of two products made by `prepare`, the first with the activation, the second with a residual.
  virtual Status join(std::unique_ptr<Linear> in, std::unique_ptr<Linear> out, std::unique_ptr<FeedForward>& joined);
  virtual size_t workspace_bytes() const = 0;
  // Whether the kernels before and after may be chained by programmatic dependent launch.
  virtual bool dependent_launch() const = 0;
  // Whether it takes LayerNorms over: Norms in LinearWeights, sums in Rows.
  virtual bool folds() const = 0;
  // After all `prepare`: refused when a Norm cannot be folded into its weights without loss.
  virtual Status check_folds() const { return {}; }
};

// One product after the other.
class TwoProducts final : public FeedForward {
 public:
  TwoProducts(std::unique_ptr<Linear> in, std::unique_ptr<Linear> out) : in_(std::move(in)), out_(std::move(out)) {}
  Status run(const Rows& x, int rows, void* inner, void* y, float2* y_sums, int& y_parts, Stream& along) override {
    int none = 0;
    EMBERT_TRY(in_->run(x, {}, rows, inner, nullptr, none, along.turned()));
    return out_->run({inner}, x, rows, y, y_sums, y_parts, along.turned());
  }

 private:
  std::unique_ptr<Linear> in_, out_;
};

inline Status GemmProvider::join(std::unique_ptr<Linear> in, std::unique_ptr<Linear> out,
                                 std::unique_ptr<FeedForward>& joined) {
  joined = std::make_unique<TwoProducts>(std::move(in), std::move(out));
  return {};
}

// cuBLASLt, loaded when first asked for: `library` is a file name or path, empty for the one beside the toolkit.
Status make_cublaslt(DType dtype, const std::string& library, std::unique_ptr<GemmProvider>& provider);

// Our own kernels: sm_90a, 16-bit types.
Status make_hopper(DType dtype, std::unique_ptr<GemmProvider>& provider);

}  // namespace embert
