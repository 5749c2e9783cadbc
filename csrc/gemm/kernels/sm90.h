// Our Hopper kernels as a GemmProvider: what the provider and its products hold. sm90_prepare.cu folds LayerNorms
// into them, sm90_linear.cu launches them, sm90_rope.cu and sm90_gated.cu those that turn or gate,
// sm90_feed_forward.cu joins two of them, sm90_int8.cu has those of
// 8 bits.
#pragma once

#include <memory>
#include <set>
#include <type_traits>

#include "common/memory.h"
#include "common/tensor_maps.h"
#include "gemm/epilogue/arguments.cuh"
#include "gemm/gemm.h"
#include "gemm/heuristics.h"

namespace embert::hopper {

// Calls `run` with the activation as a compile-time constant.
template <typename Run>
Status with_activation(Activation activation, Run run) {
  switch (activation) {
    case Activation::kGeluErf:
      return run(std::integral_constant<Activation, Activation::kGeluErf>());
    case Activation::kGeluTanh:
      return run(std::integral_constant<Activation, Activation::kGeluTanh>());
    case Activation::kRelu:
      return run(std::integral_constant<Activation, Activation::kRelu>());
    default:
      return run(std::integral_constant<Activation, Activation::kNone>());
  }
}

// The same for a product's gates.
template <typename Run>
Status with_gate(Activation activation, Run run) {
  if (activation == Activation::kSilu) return run(std::integral_constant<Activation, Activation::kSilu>());
  if (activation == Activation::kNone) return Status::refused("hopper gemm: gates without an activation");
  return with_activation(activation, [&](auto constant) {
    if constexpr (decltype(constant)::value != Activation::kNone) return run(constant);
    return Status();
  });
}

class Hopper;
class HopperFeedForward;

// One matrix product.
class HopperLinear final : public Linear {
  friend class HopperFeedForward;

 public:
  HopperLinear(Hopper& owner, const LinearWeights& weights)
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
    int tile_rows = 0;  // for few rows
  };
  template <typename T>
  Status fold(const Stream& stream);
  template <typename T>
  Status run_type(const Call& call);
  template <typename T, bool kPrescaledRows>
  Status run_tiled(const Call& call);
  template <typename T, typename Shape, bool kPrescaledRows>
  Status run_small_m(const Call& call);
  template <typename T, bool kPrescaledRows>
  Status run_plain(const Call& call, GemmKernel kernel);
  template <typename T, bool kPrescaledRows>
  Status run_residual(const Call& call, GemmKernel kernel);
  // sm90_rope.cu, sm90_gated.cu; `tile` is of few rows or in turn.
  template <typename T, bool kPrescaledRows>
  Status run_rope(const Call& call, const GemmConfig& tile);
  template <typename T, bool kPrescaledRows>
  Status run_gated(const Call& call, const GemmConfig& tile);
  // sm90_launch.cuh
  template <typename Shape, typename Kernel, typename... More>
  Status launch_small_m(const Call& call, Kernel kernel, const More&... more);
  template <typename Kernel, typename... More>
  Status launch_pingpong(const Call& call, Kernel kernel, const More&... more);
  template <typename T, typename Shape, Activation kActivation, bool kResidual, bool kPrescaledRows>
  Status run_cooperative(const Call& call);
  GemmArguments arguments_of(const Call& call, int tile_columns = 0) const;
  Status map_operands(const Call& call, int x_rows, int w_rows, int boxes, const CUtensorMap*& x_map,
                      const CUtensorMap*& w_map);
  cudaLaunchConfig_t configure(const Call& call, int shared_bytes, cudaLaunchAttribute (&attributes)[2]) const;
  template <typename Shape>
  cudaLaunchConfig_t configure_many(const Call& call, int tiles, cudaLaunchAttribute (&attributes)[2]) const;
  Status said(cudaError_t code, int rows) const;

  float2* residual_columns() const { return columns_.as<float2>(); }
  void* plain_columns() const { return residual_columns() + padded_; }
  void* next_gamma() const { return residual_columns() + 2 * padded_; }

  Hopper& owner_;
  LinearWeights weights_;  // without `exact` and `rope`, which live only while they are prepared
  RopeColumns rope_;       // without a table: no RoPE
  int w_rows_;             // of W; with gates two for each column of y
  // What the epilogue reads for each of W's rows: the constants with a residual, those without one (a float2 or a
  // float), and the next LayerNorm's gamma.
  DeviceBuffer columns_;
  int padded_ = 0;
};

// All products of an encoder, and what they share.
class Hopper final : public GemmProvider {
 public:
  explicit Hopper(DType dtype) : dtype_(dtype), maps_(dtype) {}

  Status open();

  const char* name() const override { return "hopper"; }
  size_t workspace_bytes() const override { return between_blocks_.bytes(); }
  bool dependent_launch() const override { return true; }
  bool folds() const override { return true; }
  bool fuses_rope() const override { return true; }
  bool fuses_gate() const override { return true; }
  bool has_int8() const override { return dtype_ == DType::kFloat16; }
  Status check_folds() const override;
  Status prepare(const LinearWeights& weights, const Stream& stream, std::unique_ptr<Linear>& linear) override;
  Status prepare_maxima(const LinearWeights& weights, const Stream& stream, std::unique_ptr<TextMaxima>& made) override;
  Status join(std::unique_ptr<Linear> in, std::unique_ptr<Linear> out, std::unique_ptr<FeedForward>& joined) override;
  // sm90_int8.cu
  Status prepare_int8(const LinearWeights& weights, const Stream& stream, std::unique_ptr<Linear>& linear);
  bool join_int8(std::unique_ptr<Linear>& in, std::unique_ptr<Linear>& out, std::unique_ptr<FeedForward>& joined);

  Status map(const BoxedMatrix& matrix, const CUtensorMap*& found) { return maps_.get(matrix, found); }

  // Allows a kernel more shared memory than 48 KB, once.
  Status allow_shared_memory(const void* kernel, int bytes) {
    if (!allowed_.insert(kernel).second) return {};
    EMBERT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    return {};
  }

  // What blocks of the feed-forward kernel leave each other (sm90_feed_forward.cu); all layers share it.
  DeviceBuffer& between_blocks() { return between_blocks_; }

  // The largest relative error that folding a gamma into a row of weights has made so far; on the device.
  float* fold_error() const { return fold_error_.as<float>(); }
  DType dtype() const { return dtype_; }
  int num_sms() const { return num_sms_; }
  int clusters() const { return num_sms_ / kCluster; }

 private:
  DType dtype_;
  int num_sms_ = 0;
  TensorMaps maps_;
  std::set<const void*> allowed_;
  DeviceBuffer fold_error_, between_blocks_;
};

}  // namespace embert::hopper
