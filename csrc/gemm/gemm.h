// y[rows, out] = activation(x[rows, in] · W[out, in]ᵀ + bias (+ residual)): the one matrix product an encoder needs.
//
// Behind it: cuBLASLt (every device and type) and our own Hopper kernels, which also take LayerNorms over (see
// ../EPILOGUES.md). An output row must depend on its own row, the weights and nothing else, bit for bit, whatever
// `rows` is: so no split of K that varies with the number of rows.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "../kernels/norm.h"
#include "../kernels/shapes.h"
#include "../launch.h"

namespace embert {

struct LinearWeights {
  void* weight = nullptr;      // [out, in]; input_norm is folded into it in place
  const void* bias = nullptr;  // [out]
  int out = 0, in = 0;
  Activation activation = Activation::kNone;
  Norm input_norm, residual_norm;  // only where the provider folds
  float epsilon = 0.0f;            // of both
  // [out, in]: what `weight` was rounded from, where that is at hand. Only while it is prepared.
  const float* exact = nullptr;
  // What another product will want soon: brought to the L2 cache while this one is at work, where a provider sees a use
  // in it.
  const void* ahead = nullptr;
  size_t ahead_bytes = 0;
};

class Linear {
 public:
  virtual ~Linear() = default;
  // residual: [rows, out] or none, added before rounding; never with an activation. y may not be x; it may be residual.
  // y_sums: null, or where the sums of y's rows go; `y_parts` is then set.
  virtual Status run(const Rows& x, const Rows& residual, int rows, void* y, float2* y_sums, int& y_parts,
                     const Stream& stream) = 0;
};

// What follows attention in a layer, with x between its two parts: x = attention_out(attended) + residual,
// y = out(activation(in(x))) + x. Each kernel goes the other way than the one before it on `along`.
class LayerTail {
 public:
  // Where x goes, with room for its sums (null: not wanted, and x needs no LayerNorm) and for the activations between
  // `in` and `out`, [rows, inner].
  struct Room {
    void* x;
    float2* x_sums;
    void* inner;
  };

  // Made by GemmProvider::prepare: `in` with the activation, the others with a residual.
  LayerTail(std::unique_ptr<Linear> attention_out, std::unique_ptr<Linear> in, std::unique_ptr<Linear> out)
      : attention_out_(std::move(attention_out)), in_(std::move(in)), out_(std::move(out)) {}
  virtual ~LayerTail() = default;

  Status attention_out(const Rows& attended, const Rows& residual, int rows, void* x, float2* x_sums, int& x_parts,
                       Stream& along) {
    return attention_out_->run(attended, residual, rows, x, x_sums, x_parts, along.turned());
  }
  Status feed_forward(const Rows& x, int rows, void* inner, void* y, float2* y_sums, int& y_parts, Stream& along) {
    int none = 0;
    EMBERT_TRY(in_->run(x, {}, rows, inner, nullptr, none, along.turned()));
    return out_->run({inner}, x, rows, y, y_sums, y_parts, along.turned());
  }
  // Both; what is in `room` afterwards is nobody's business. y may be the residual, its sums the residual's, and
  // `inner` may be `attended`.
  virtual Status run(const Rows& attended, const Rows& residual, int rows, const Room& room, void* y, float2* y_sums,
                     int& y_parts, Stream& along) {
    Rows x{room.x, room.x_sums};
    EMBERT_TRY(attention_out(attended, residual, rows, room.x, room.x_sums, x.parts, along));
    return feed_forward(x, rows, room.inner, y, y_sums, y_parts, along);
  }

 protected:
  std::unique_ptr<Linear> attention_out_, in_, out_;
};

class GemmProvider {
 public:
  virtual ~GemmProvider() = default;
  virtual const char* name() const = 0;
  virtual Status prepare(const LinearWeights& weights, const Stream& stream, std::unique_ptr<Linear>& linear) = 0;
  virtual Status join(std::unique_ptr<Linear> attention_out, std::unique_ptr<Linear> in, std::unique_ptr<Linear> out,
                      std::unique_ptr<LayerTail>& joined) {
    joined = std::make_unique<LayerTail>(std::move(attention_out), std::move(in), std::move(out));
    return {};
  }
  virtual size_t workspace_bytes() const = 0;
  // Whether the kernels before and after may be chained by programmatic dependent launch.
  virtual bool dependent_launch() const = 0;
  // Whether it takes LayerNorms over: Norms in LinearWeights, sums in Rows.
  virtual bool folds() const = 0;
  // After all `prepare`: refused when a Norm cannot be folded into its weights without loss.
  virtual Status check_folds() const { return {}; }
};

// cuBLASLt, loaded when first asked for: `library` is a file name or path, empty for the one beside the toolkit.
Status make_cublaslt(DType dtype, const std::string& library, std::unique_ptr<GemmProvider>& provider);

// Our own kernels: sm_90a, 16-bit types.
Status make_hopper(DType dtype, std::unique_ptr<GemmProvider>& provider);

}  // namespace embert
