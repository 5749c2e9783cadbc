// What follows attention in a layer of narrow models as one launch (hopper_tail.cuh), where that is the faster one.

#include <algorithm>

#include "hopper_linear.cuh"
#include "hopper_tail.cuh"

namespace embert::hopper {
namespace {

// From so many rows on what follows attention (hidden size 384) is one kernel, whose blocks have 128 rows each. At 11
// 264 rows three products take 71 µs in a burst and it takes 74 (under load 76 and 74). From the next row on their
// tiles need one more round: at 11 776 rows 83 and 74.
constexpr int kJoinedRows = 11265;

}  // namespace

// One kernel where that is the faster one, else three.
class HopperTail final : public LayerTail {
 public:
  using LayerTail::LayerTail;
  static bool takes(const Linear& attention_out, const Linear& in, const Linear& out) {
    const LinearWeights &o = own(attention_out).weights_, &first = own(in).weights_, &second = own(out).weights_;
    constexpr int kHidden = TailShape::kHidden;
    return o.in == kHidden && o.out == kHidden && first.in == kHidden && second.out == kHidden &&
           first.out % TailShape::kChunk == 0 && first.out <= TailShape::kMostInner;
  }

  Status run(const Rows& attended, const Rows& residual, int rows, const Room& room, void* y, float2* y_sums,
             int& y_parts, Stream& along) override {
    // The kernel copies the residual's sums as they are: whole groups, 16 bytes at a time.
    const bool whole = residual.parts == 1 && reinterpret_cast<uintptr_t>(residual.sums) % 16 == 0;
    if (rows < kJoinedRows || !whole) return LayerTail::run(attended, residual, rows, room, y, y_sums, y_parts, along);
    const Rows x{room.x, room.x_sums};
    int none = 0;
    const Stream& stream = along.turned();
    const HopperLinear::Call first{attended, residual, rows, room.x, nullptr, none, stream};
    const HopperLinear::Call last{x, x, rows, y, y_sums, y_parts, stream};  // x is its own residual
    const HopperLinear& in = own(*in_);
    return with_activation(in.weights_.activation, [&](auto activation) {
      constexpr Activation kActivation = decltype(activation)::value;
      return in.owner_.dtype() == DType::kFloat16 ? launch<half_t, kActivation>(first, last)
                                                  : launch<bfloat_t, kActivation>(first, last);
    });
  }

 private:
  static const HopperLinear& own(const Linear& linear) { return static_cast<const HopperLinear&>(linear); }

  template <typename T, Activation kActivation>
  Status launch(const HopperLinear::Call& first, const HopperLinear::Call& last) {
    using Shape = TailShape;
    const HopperLinear &attention_out = own(*attention_out_), &in = own(*in_), &out = own(*out_);
    const auto kernel = layer_tail_kernel<T, kActivation>;
    Hopper& owner = in.owner_;
    const int rows = last.rows, inner = in.weights_.out;
    EMBERT_TRY(owner.allow_shared_memory(reinterpret_cast<const void*>(kernel), Shape::kSharedBytes));
    const CUtensorMap *attended_map = nullptr, *attended_w_map = nullptr, *residual_map = nullptr, *x_map = nullptr;
    const CUtensorMap *in_map = nullptr, *out_map = nullptr, *y_map = nullptr;
    const auto rows_of_warp = [&](const void* data, const CUtensorMap*& map) {
      return owner.map({data, rows, Shape::kHidden, 16, 64}, map);
    };
    const auto halves = [&](const HopperLinear& linear, int depth, const CUtensorMap*& map) {
      return owner.map({linear.weights_.weight, Shape::kHidden, depth, Shape::kHalf / kCluster, 64}, map);
    };
    EMBERT_TRY(rows_of_warp(first.x.data, attended_map));
    EMBERT_TRY(rows_of_warp(first.y, x_map));
    EMBERT_TRY(rows_of_warp(last.y, y_map));
    EMBERT_TRY(halves(attention_out, Shape::kHidden, attended_w_map));
    EMBERT_TRY(halves(out, inner, out_map));
    EMBERT_TRY(owner.map({in.weights_.weight, inner, Shape::kHidden, Shape::kChunk / kCluster, 64}, in_map));
    EMBERT_TRY(owner.map({first.residual.data, rows, Shape::kHidden, Shape::kRows, 32}, residual_map));
    last.y_parts = 1;
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t config = in.configure(last, Shape::kSharedBytes, attributes);
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {kCluster, 1, 1};
    config.numAttrs = 2;
    const int tiles = tiles_of(rows, Shape::kRows * kCluster);
    config.gridDim = dim3(std::min(tiles, owner.processors() / kCluster) * kCluster);
    config.blockDim = dim3(Shape::kThreads);
    auto* const held = owner.between_blocks().as<float>();
    auto* const flags = reinterpret_cast<int*>(held + size_t(owner.processors()) * Shape::kHeldFloats);
    const TailArguments work{attention_out.arguments_of(first), reinterpret_cast<const float2*>(in.plain_columns()),
                             inner / Shape::kChunk, held, flags};
    return in.said(cudaLaunchKernelEx(&config, kernel, *attended_map, *attended_w_map, *residual_map, *x_map, *in_map,
                                      *out_map, *y_map, out.arguments_of(last), work),
                   rows);
  }
};

Status Hopper::join(std::unique_ptr<Linear> attention_out, std::unique_ptr<Linear> in, std::unique_ptr<Linear> out,
                    std::unique_ptr<LayerTail>& joined) {
  if (!HopperTail::takes(*attention_out, *in, *out))
    return GemmProvider::join(std::move(attention_out), std::move(in), std::move(out), joined);
  if (between_blocks_.bytes() == 0) {  // accumulators and scales, then flags
    const size_t block = TailShape::kHeldFloats * sizeof(float) + TailShape::kFlags * sizeof(int);
    EMBERT_TRY(between_blocks_.allocate(processors_ * block));
    EMBERT_CUDA(cudaMemset(between_blocks_.as(), 0, between_blocks_.bytes()));
  }
  joined = std::make_unique<HopperTail>(std::move(attention_out), std::move(in), std::move(out));
  return {};
}

}  // namespace embert::hopper
