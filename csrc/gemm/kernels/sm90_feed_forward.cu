// The feed-forward layer of narrow models as one launch (gemm/kernels/feed_forward.cuh), where that is faster than two
// GEMMs.

#include "gemm/kernels/feed_forward.cuh"
#include "gemm/kernels/sm90.h"
#include "gemm/kernels/sm90_launch.cuh"

namespace embert::sm90 {

// One kernel from kFusedFeedForwardRows rows on, two GEMMs below.
class FeedForwardSm90 final : public FeedForward {
 public:
  FeedForwardSm90(std::unique_ptr<LinearSm90> in, std::unique_ptr<LinearSm90> out)
      : in_(*in), out_(*out), unfused_(std::move(in), std::move(out)) {}
  static bool takes(const LinearSm90& in, const LinearSm90& out) {
    // The kernel reads x's row statistics once, for x and for the residual: both have the LayerNorm, or neither has.
    const bool same_norms = (in.weights_.input_norm.gamma == nullptr) == (out.weights_.residual_norm.gamma == nullptr);
    return same_norms && !in.weights_.gated && in.weights_.k == FeedForwardShape::kHidden &&
           out.weights_.n == FeedForwardShape::kHidden && in.weights_.n % FeedForwardShape::kChunk == 0 &&
           in.weights_.n <= FeedForwardShape::kMaxInner && in.weights_.activation != Activation::kNone &&
           (in.weights_.input_norm.gamma != nullptr || !in.weights_.prescaled_rows);
  }

  Status run(const RowView& x, int rows, void* inner, void* y, float2* y_stats, int& y_splits,
             Stream& stream) override {
    if (rows < kFusedFeedForwardRows) return unfused_.run(x, rows, inner, y, y_stats, y_splits, stream);
    EMBERT_TRY(check_operands(x, x, y, y_stats));
    const LinearSm90::Call call{
        x, x, rows, y, y_stats, y_splits, stream.alternate_direction()};  // x is its own residual
    return with_half_dtype(in_.owner_.dtype(), [&](auto type) {
      return with_inner_activation(in_.weights_.activation, [&](auto activation) {
        using T = decltype(type);
        constexpr Activation kActivation = decltype(activation)::value;
        return launch_fused(in_.weights_.prescaled_rows ? feed_forward_kernel<T, kActivation, true>
                                                        : feed_forward_kernel<T, kActivation, false>,
                            call);
      });
    });
  }

 private:
  template <typename Kernel>
  Status launch_fused(Kernel kernel, const LinearSm90::Call& call) {
    using Shape = FeedForwardShape;
    GemmSm90& owner = in_.owner_;
    const int inner = in_.weights_.n;
    const CUtensorMap *x_map = nullptr, *in_map = nullptr, *out_map = nullptr, *y_map = nullptr;
    EMBERT_TRY(owner.map({call.x.data, call.m, Shape::kHidden, 64, 64}, x_map));
    EMBERT_TRY(owner.map({in_.weights_.weight, inner, Shape::kHidden, Shape::kChunk / kCluster, 64}, in_map));
    EMBERT_TRY(owner.map({out_.weights_.weight, Shape::kHidden, inner, Shape::kHalf / kCluster, 64}, out_map));
    EMBERT_TRY(owner.map({call.y, call.m, Shape::kHidden, 16, 64}, y_map));  // a warp's rows
    call.y_splits = 1;
    const int tiles = tiles_of(call.m, Shape::kRows * kCluster);
    auto* const partial = owner.exchange_buffer().as<float>();
    auto* const flags = reinterpret_cast<int*>(partial + size_t(owner.num_sms()) * Shape::kPartialFloats);
    const FeedForwardArguments work{in_.plain_columns(), inner / Shape::kChunk, partial, flags};
    return launch_persistent<Shape>("feed_forward", owner, kernel, tiles, call.stream, *x_map, *in_map, *out_map,
                                    *y_map, out_.arguments_of(call), work);
  }

  LinearSm90 &in_, &out_;  // owned by unfused_
  UnfusedFeedForward unfused_;
};

Status GemmSm90::fuse(std::unique_ptr<Linear> in, std::unique_ptr<Linear> out, std::unique_ptr<FeedForward>& fused) {
  if (fuse_int8(in, out, fused)) return {};
  if (dynamic_cast<LinearSm90*>(in.get()) == nullptr || dynamic_cast<LinearSm90*>(out.get()) == nullptr)
    return GemmProvider::fuse(std::move(in), std::move(out), fused);
  const auto own = [](std::unique_ptr<Linear>& linear) {
    return std::unique_ptr<LinearSm90>(static_cast<LinearSm90*>(linear.release()));
  };
  std::unique_ptr<LinearSm90> first = own(in), second = own(out);
  if (!FeedForwardSm90::takes(*first, *second)) return GemmProvider::fuse(std::move(first), std::move(second), fused);
  if (exchange_buffer_.bytes() == 0) {  // accumulators, then flags
    const size_t block = FeedForwardShape::kPartialFloats * sizeof(float) + FeedForwardShape::kFlags * sizeof(int);
    EMBERT_TRY(exchange_buffer_.allocate(num_sms_ * block));
    EMBERT_TRY(exchange_buffer_.zero());
  }
  fused = std::make_unique<FeedForwardSm90>(std::move(first), std::move(second));
  return {};
}

}  // namespace embert::sm90
