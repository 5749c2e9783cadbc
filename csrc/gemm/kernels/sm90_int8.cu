// int8 GEMMs: a separate kernel quantizes rows of x, then they are multiplied as integers (EPILOGUES.md).

#include <algorithm>

#include "gemm/epilogue/fold.cuh"
#include "gemm/kernels/cooperative.cuh"
#include "gemm/kernels/int8_dequant.cuh"
#include "gemm/kernels/residual_pingpong.cuh"
#include "gemm/kernels/sm90.h"
#include "gemm/kernels/sm90_launch.cuh"

namespace embert::sm90 {
namespace {

// The constants of a GEMM without a residual: {scale, factor·bias} of each column.
__global__ void __launch_bounds__(kFoldThreads)
    pair_scales_kernel(const float* scales, const float* bias, int out, float factor, float2* columns) {
  griddepcontrol_wait();
  const int n = blockIdx.x * kFoldThreads + threadIdx.x;
  if (n < out) columns[n] = {scales[n], factor * bias[n]};
}

class Int8LinearSm90 final : public Linear {
 public:
  Int8LinearSm90(GemmSm90& owner, const LinearWeights& weights) : owner_(owner), weights_(weights) {}

  // With a residual, {γ, bias + β} of each column and then the scales; otherwise {scale, factor·bias}. Zeros past the
  // end.
  Status init(const Stream& stream) {
    const int blocks = tiles_of(weights_.n, kFoldThreads);
    padded_ = tiles_of(weights_.n, kColumnPadding) * kColumnPadding;
    EMBERT_TRY(columns_.allocate(padded_ * (sizeof(float2) + sizeof(float) + sizeof(half_t))));
    EMBERT_CUDA(cudaMemsetAsync(columns_.as(), 0, columns_.bytes(), stream.handle));
    if (weights_.residual_norm.gamma == nullptr)
      return launch("pair_scales", pair_scales_kernel, blocks, kFoldThreads, 0, stream, weights_.scales, weights_.bias,
                    weights_.n, pair_factor(weights_.activation), columns_.as<float2>());
    EMBERT_CUDA(cudaMemcpyAsync(scales(), weights_.scales, weights_.n * sizeof(float), cudaMemcpyDeviceToDevice,
                                stream.handle));
    return launch("fold_residual", fold_residual_kernel<half_t>, blocks, kFoldThreads, 0, stream, weights_.bias,
                  weights_.residual_norm, false, static_cast<const float*>(nullptr), weights_.n, columns_.as<float2>(),
                  reinterpret_cast<half_t*>(scales() + padded_));
  }

  Status run(const RowView& x, const RowView& residual, int rows, void* y, float2* y_stats, int& y_splits,
             const Stream& stream) override {
    if (rows == 0) return {};
    EMBERT_TRY(check_operands(x, residual, y, y_stats));
    const bool has_residual = residual.data != nullptr;
    EMBERT_TRY(check_residual_int8(weights_, residual, y_stats));
    y_splits = 1;
    if (x.maxima != nullptr) {
      if (!supports_blocks(rows))
        return Status::refused("hopper int8: x comes in blocks, which are not for this product");
      return run_blocks({residual, rows, y, y_stats, stream, static_cast<const int8_t*>(x.data), x.maxima});
    }
    EMBERT_TRY(quantize(x, rows, stream));
    const Call call{residual, rows, y, y_stats, stream, weights_.quantized.data};
    const GemmConfig tile = tile_of(rows);
    if (tile.kernel == GemmKernel::kSmallM) return run_small_m(call, tile, y_splits);
    if (has_residual) return run_any_wide<0>(call, tile.kernel);
    return with_activation(weights_.activation, [&](auto activation) {
      constexpr Activation kActivation = decltype(activation)::value;
      return tile.kernel == GemmKernel::kShared ? run_plain(call, int8_dequant_kernel<kActivation, false>)
                                                : run_plain(call, int8_dequant_kernel<kActivation, true>);
    });
  }

  bool supports_blocks(int rows) const override {
    return rows > 0 && weights_.block > 0 && tile_of(rows).kernel != GemmKernel::kSmallM;
  }
  int columns() const { return weights_.n; }

  // y in blocks of 128 columns, where writes_blocks.
  bool writes_blocks(int rows) const {
    return rows > 0 && weights_.activation != Activation::kNone && tile_of(rows).kernel != GemmKernel::kSmallM;
  }
  Status write_blocks(const RowView& x, int rows, const QuantizedBlocks& to, const Stream& stream) {
    EMBERT_TRY(quantize(x, rows, stream));
    const Call call{{}, rows, to.data, nullptr, stream, weights_.quantized.data, to.maxima};
    return with_inner_activation(weights_.activation, [&](auto activation) {
      constexpr Activation kActivation = decltype(activation)::value;
      return tile_of(rows).kernel == GemmKernel::kShared ? run_plain(call, block_kernel<kActivation, false>)
                                                         : run_plain(call, block_kernel<kActivation, true>);
    });
  }

 private:
  struct Call {
    const RowView& residual;
    int m;
    void* y;
    float2* y_stats;
    const Stream& stream;
    const int8_t* x;
    const void* maxima = nullptr;  // of blocks: y's, or x's with a residual
  };

  Status quantize(const RowView& x, int rows, const Stream& stream) const {
    if (x.data == nullptr) return {};
    EMBERT_TRY(check_input_int8(weights_, x));
    if (weights_.block > 0)
      return quantize_block_rows(owner_.dtype(), x.data, rows, weights_.k, weights_.block, weights_.quantized, stream);
    return quantize_rows(owner_.dtype(), weights_.input_norm.gamma == nullptr ? RowView{x.data} : x,
                         weights_.input_norm, rows, weights_.k, weights_.epsilon, weights_.quantized, stream);
  }
  GemmConfig tile_of(int rows) const {
    return choose_int8_config({rows, weights_.n, weights_.k, weights_.residual_norm.gamma != nullptr},
                              owner_.num_sms());
  }
  template <int kBlock>
  Status run_any_wide(const Call& call, GemmKernel kernel) {
    if (kernel == GemmKernel::kPingPong256) return run_pingpong<kBlock>(call);
    if (kernel == GemmKernel::kCooperative256) return run_cooperative<Cooperative256, kBlock>(call);
    return kernel == GemmKernel::kCooperative128 ? run_cooperative<Cooperative128, kBlock>(call)
                                                 : run_cooperative<Cooperative192x128, kBlock>(call);
  }
  Status run_blocks(const Call& call) {
    const GemmKernel kernel = tile_of(call.m).kernel;
    return weights_.block == kInnerBlock ? run_any_wide<kInnerBlock>(call, kernel)
                                         : run_any_wide<kHeadBlock>(call, kernel);
  }

  float* scales() const { return reinterpret_cast<float*>(columns_.as<float2>() + padded_); }
  DequantScales product_scales(const Call& call) const {
    return {weights_.quantized.scales, reinterpret_cast<const float2*>(scales()), const_cast<void*>(call.maxima)};
  }

  GemmArguments arguments_of(const Call& call, int tile_columns) const {
    GemmArguments args{};
    args.columns = columns_.as();
    args.residual = call.residual.data;
    args.y = call.y;
    args.row_stats = call.residual.stats;
    args.y_stats = call.y_stats;
    args.splits = call.residual.splits;
    args.split_columns = kStatColumns / std::max(call.residual.splits, 1);
    args.width = weights_.n;
    args.inverse_width = args.mean_scale = 1.0f / float(weights_.n);
    args.epsilon = weights_.epsilon;
    args.m = call.m;
    args.n = weights_.n;
    args.k = weights_.k;
    args.backwards = call.stream.backwards;
    const uint32_t tiles_across = tiles_of(weights_.n, tile_columns);
    args.columns_inverse = ((1u << 31) + tiles_across - 1) / tiles_across;
    return args;
  }

  GemmOperands operands_of(const Call& call, int y_box_columns = 64) const {
    return {"hopper int8", call.x, weights_.weight, kByteColumns, weights_.n, y_box_columns};
  }

  Status run_small_m(const Call& call, const GemmConfig& tile, int& y_splits) {
    const auto run = [&](auto shape, auto kernel) {
      using Shape = decltype(shape);
      return launch_small_m<Shape>(owner_, kernel, tile.rows, operands_of(call), arguments_of(call, Shape::kColumns),
                                   call.stream, product_scales(call));
    };
    if (call.residual.data != nullptr) {
      y_splits = kStatColumns / SmallM32::kColumns;
      return run(SmallM32(), small_m_int8_kernel<SmallM32, Activation::kNone, true>);
    }
    return with_activation(weights_.activation, [&](auto activation) {
      constexpr Activation kActivation = decltype(activation)::value;
      return tile.columns == 64 ? run(SmallM64(), small_m_int8_kernel<SmallM64, kActivation, false>)
                                : run(SmallM32(), small_m_int8_kernel<SmallM32, kActivation, false>);
    });
  }

  template <typename Kernel>
  Status run_plain(const Call& call, Kernel kernel) {
    const GemmOperands operands = operands_of(call, call.maxima != nullptr ? kByteColumns : 64);
    return launch_pingpong<PingPongShape>(owner_, kernel, operands, arguments_of(call, PingPongShape::kColumns),
                                          call.stream, product_scales(call));
  }

  template <int kBlock>
  Status run_pingpong(const Call& call) {
    using Shape = ResidualPingPongShape;
    const GemmArguments args = arguments_of(call, Shape::kColumns);
    const CUtensorMap *x_map = nullptr, *w_map = nullptr, *y_map = nullptr, *residual_map = nullptr;
    EMBERT_TRY(owner_.map({call.x, args.m, args.k, Shape::kRows, kByteColumns}, x_map));
    EMBERT_TRY(owner_.map({weights_.weight, args.n, args.k, Shape::kWShare, kByteColumns}, w_map));
    EMBERT_TRY(owner_.map({args.y, args.m, args.n, 16, 64}, y_map));  // a warp's rows
    EMBERT_TRY(owner_.map({args.residual, args.m, args.n, 16, 64}, residual_map));
    const int tiles = tiles_of(args.m, Shape::kRows * kCluster) * tiles_of(args.n, Shape::kColumns);
    return launch_persistent<Shape>("hopper int8", owner_, residual_pingpong_kernel<kBlock>, tiles, call.stream, *x_map,
                                    *w_map, *residual_map, *y_map, args, product_scales(call));
  }

  template <typename Shape, int kBlock>
  Status run_cooperative(const Call& call) {
    return launch_cooperative<Shape, true>(owner_, cooperative_int8_kernel<Shape, kBlock>, operands_of(call),
                                           arguments_of(call, Shape::kColumns), call.stream, product_scales(call));
  }

  GemmSm90& owner_;
  LinearWeights weights_;
  DeviceBuffer columns_;
  int padded_ = 0;
};

// Between the two GEMMs the inner rows are int8 where both have many rows: they are neither written in FP16 nor read by
// a kernel that quantizes.
class Int8FeedForwardSm90 final : public FeedForward {
 public:
  Int8FeedForwardSm90(std::unique_ptr<Int8LinearSm90> in, std::unique_ptr<Int8LinearSm90> out)
      : in_(*in), out_(*out), unfused_(std::move(in), std::move(out)) {}

  Status run(const RowView& x, int rows, void* inner, void* y, float2* y_stats, int& y_splits,
             Stream& stream) override {
    if (!in_.writes_blocks(rows) || !out_.supports_blocks(rows))
      return unfused_.run(x, rows, inner, y, y_stats, y_splits, stream);
    const QuantizedBlocks blocks = QuantizedBlocks::in(inner, rows, in_.columns());
    EMBERT_TRY(in_.write_blocks(x, rows, blocks, stream.alternate_direction()));
    RowView between{blocks.data};
    between.maxima = blocks.maxima;
    return out_.run(between, x, rows, y, y_stats, y_splits, stream.alternate_direction());
  }

 private:
  Int8LinearSm90 &in_, &out_;  // owned by unfused_
  UnfusedFeedForward unfused_;
};

}  // namespace

bool GemmSm90::fuse_int8(std::unique_ptr<Linear>& in, std::unique_ptr<Linear>& out,
                         std::unique_ptr<FeedForward>& fused) {
  if (dynamic_cast<Int8LinearSm90*>(in.get()) == nullptr || dynamic_cast<Int8LinearSm90*>(out.get()) == nullptr)
    return false;
  const auto own = [](std::unique_ptr<Linear>& linear) {
    return std::unique_ptr<Int8LinearSm90>(static_cast<Int8LinearSm90*>(linear.release()));
  };
  std::unique_ptr<Int8LinearSm90> first = own(in), second = own(out);
  fused = std::make_unique<Int8FeedForwardSm90>(std::move(first), std::move(second));
  return true;
}

Status GemmSm90::prepare_int8(const LinearWeights& weights, const Stream& stream, std::unique_ptr<Linear>& linear) {
  if (!has_int8()) return Status::refused("hopper int8: rows must be in float16");
  if (weights.pitch != 0 || weights.gated || weights.rope != nullptr || weights.prescaled_rows)
    return Status::refused("hopper int8: gates, RoPE columns, pitches and gammas in rows are for 16 bits");
  if (!quantize_supports(weights.k, weights.input_norm.gamma != nullptr) || weights.n % 64 != 0 ||
      tiles_of(weights.n, 128) > 256)
    return Status::refused("hopper int8: ", weights.k, " to ", weights.n, " columns");
  if (weights.residual_norm.gamma != nullptr &&
      (weights.activation != Activation::kNone || weights.n > kMaxStatColumns))
    return Status::refused("hopper int8: a residual and an activation, or over 1024 columns");
  auto gemm = std::make_unique<Int8LinearSm90>(*this, weights);
  EMBERT_TRY(gemm->init(stream));
  linear = std::move(gemm);
  return {};
}

}  // namespace embert::sm90
