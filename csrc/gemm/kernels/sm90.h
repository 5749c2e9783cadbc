// Our Hopper kernels as a GemmProvider: the members of the provider and of its GEMMs. sm90_prepare.cu folds LayerNorms
// into them, sm90_linear.cu launches them, sm90_fused.cu launches those with RoPE or gates,
// sm90_feed_forward.cu fuses two of them, sm90_int8.cu has those of int8.
#pragma once

#include <memory>
#include <set>

#include "common/memory.h"
#include "common/tensor_maps.h"
#include "gemm/epilogue/arguments.cuh"
#include "gemm/gemm.h"
#include "gemm/heuristics.h"

namespace embert::sm90 {

// Calls `run` with a GEMM's activation as a compile-time constant.
template <typename Run>
Status with_activation(Activation activation, const Run& run) {
  return with_constant<Activation::kGeluErf, Activation::kGeluTanh, Activation::kRelu, Activation::kNone>(activation,
                                                                                                          run);
}
// The same between the GEMMs of a feed-forward layer, whose first one has an activation.
template <typename Run>
Status with_inner_activation(Activation activation, const Run& run) {
  return with_constant<Activation::kGeluErf, Activation::kGeluTanh, Activation::kRelu>(activation, run);
}

// The same of a gated GEMM, which has one (sm90_checks.h).
template <typename Run>
Status with_gate(Activation activation, const Run& run) {
  return with_constant<Activation::kSilu, Activation::kGeluErf, Activation::kGeluTanh, Activation::kRelu>(activation,
                                                                                                          run);
}

constexpr int kColumnPadding = 256;  // of a GEMM's constants: the epilogue reads whole tiles of columns

class GemmSm90;
struct GemmOperands;
class FeedForwardSm90;

// One GEMM.
class LinearSm90 final : public Linear {
  friend class FeedForwardSm90;

 public:
  LinearSm90(GemmSm90& owner, const LinearWeights& weights)
      : owner_(owner), weights_(weights), w_rows_(weights.gated ? 2 * weights.n : weights.n) {
    if (weights.rope != nullptr) rope_ = *weights.rope;
  }
  Status init(const Stream& stream);
  Status run(const RowView& x, const RowView& residual, int rows, void* y, float2* y_stats, int& y_splits,
             const Stream& stream) override;

 private:
  struct Call {
    const RowView& x;
    const RowView& residual;
    int m;
    void* y;
    float2* y_stats;
    int& y_splits;
    const Stream& stream;
  };
  template <typename T>
  Status fold(const Stream& stream);
  template <typename T, bool kPrescaledRows>
  Status run_tiled(const Call& call);
  template <typename T, typename Shape, bool kPrescaledRows>
  Status run_small_m(const Call& call, int tile_rows);
  template <typename T, bool kPrescaledRows>
  Status run_plain(const Call& call, GemmKernel kernel);
  template <typename T, bool kPrescaledRows>
  Status run_residual(const Call& call, GemmKernel kernel);
  // sm90_fused.cu; `tile` is small M or ping-pong.
  template <typename T, bool kPrescaledRows>
  Status run_rope(const Call& call, const GemmConfig& tile);
  template <typename T, bool kPrescaledRows>
  Status run_gated(const Call& call, const GemmConfig& tile);
  template <typename T, typename Shape, bool kResidual, bool kPrescaledRows>
  Status run_cooperative(const Call& call);
  GemmArguments arguments_of(const Call& call, int tile_columns = 0) const;
  GemmOperands operands_of(const Call& call) const;

  float2* residual_columns() const { return columns_.as<float2>(); }
  void* plain_columns() const { return residual_columns() + padded_; }
  void* next_gamma() const { return residual_columns() + 2 * padded_; }

  GemmSm90& owner_;
  LinearWeights weights_;  // without `exact` and `rope`, which exist only during preparation
  RopeColumns rope_;       // without a table: no RoPE
  int w_rows_;             // of W; with gates two for each column of y
  // The epilogue's operands for each row of W: the constants with a residual, those without one (a float2 or a float),
  // and the next LayerNorm's gamma.
  DeviceBuffer columns_;
  int padded_ = 0;
};

// All GEMMs of an encoder, and their shared memory and state.
class GemmSm90 final : public GemmProvider {
 public:
  explicit GemmSm90(DType dtype) : dtype_(dtype), maps_(dtype) {}

  Status open();

  const char* name() const override { return "hopper"; }
  size_t workspace_bytes() const override { return exchange_buffer_.bytes(); }
  bool dependent_launch() const override { return true; }
  bool folds() const override { return true; }
  bool fuses_rope() const override { return true; }
  bool fuses_gate() const override { return true; }
  bool has_int8() const override { return dtype_ == DType::kFloat16; }
  Status check_folds() const override;
  Status prepare(const LinearWeights& weights, const Stream& stream, std::unique_ptr<Linear>& linear) override;
  Status prepare_maxima(const LinearWeights& weights, const Stream& stream,
                        std::unique_ptr<TextMaxima>& maxima_gemm) override;
  Status fuse(std::unique_ptr<Linear> in, std::unique_ptr<Linear> out, std::unique_ptr<FeedForward>& fused) override;
  // sm90_experts.cu
  Status prepare_experts(const ExpertWeights& weights, const Stream& stream,
                         std::unique_ptr<Experts>& experts) override;
  bool groups_experts() const override { return true; }
  // sm90_int8.cu
  Status prepare_int8(const LinearWeights& weights, const Stream& stream, std::unique_ptr<Linear>& linear);
  bool fuse_int8(std::unique_ptr<Linear>& in, std::unique_ptr<Linear>& out, std::unique_ptr<FeedForward>& fused);

  Status map(const BoxedMatrix& matrix, const CUtensorMap*& descriptor) { return maps_.get(matrix, descriptor); }

  // Allows a kernel more than 48 KB of shared memory, once.
  Status allow_shared_memory(const void* kernel, int bytes) {
    if (!allowed_.insert(kernel).second) return {};
    EMBERT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    return {};
  }

  // Memory through which blocks of the feed-forward kernel pass accumulators (sm90_feed_forward.cu); shared by all
  // layers.
  DeviceBuffer& exchange_buffer() { return exchange_buffer_; }

  // The largest relative error that folding a gamma into a row of weights has caused so far; on the device.
  float* fold_error() const { return fold_error_.as<float>(); }
  DType dtype() const { return dtype_; }
  int num_sms() const { return num_sms_; }
  int clusters() const { return num_sms_ / kCluster; }

 private:
  DType dtype_;
  int num_sms_ = 0;
  TensorMaps maps_;
  std::set<const void*> allowed_;
  DeviceBuffer fold_error_, exchange_buffer_;
};

}  // namespace embert::sm90
