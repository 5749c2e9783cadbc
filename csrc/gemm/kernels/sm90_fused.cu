// Launches the kernels with RoPE or gates.

#include "gemm/kernels/gated.cuh"
#include "gemm/kernels/rope.cuh"
#include "gemm/kernels/sm90.h"
#include "gemm/kernels/sm90_launch.cuh"

namespace embert::sm90 {

template <typename T, bool kPrescaledRows>
Status LinearSm90::run_rope(const Call& call, const GemmConfig& tile) {
  if (tile.kernel == GemmKernel::kSmallM) {
    const auto run = [&](auto shape) {
      using Shape = decltype(shape);
      call.y_splits = kStatColumns / Shape::kColumns;
      return launch_small_m<Shape>(owner_, small_m_rope_kernel<T, Shape, kPrescaledRows>, tile.rows, operands_of(call),
                                   arguments_of(call), call.stream, rope_);
    };
    return tile.columns == 64 ? run(SmallM64()) : run(SmallM32());
  }
  const auto kernel = tile.kernel == GemmKernel::kShared ? pingpong_rope_kernel<T, false, kPrescaledRows>
                                                         : pingpong_rope_kernel<T, true, kPrescaledRows>;
  return launch_pingpong<PingPongShape>(owner_, kernel, operands_of(call), arguments_of(call, PingPongShape::kColumns),
                                        call.stream, rope_);
}

template Status LinearSm90::run_rope<half_t, false>(const Call&, const GemmConfig&);
template Status LinearSm90::run_rope<half_t, true>(const Call&, const GemmConfig&);
template Status LinearSm90::run_rope<bfloat_t, false>(const Call&, const GemmConfig&);
template Status LinearSm90::run_rope<bfloat_t, true>(const Call&, const GemmConfig&);

template <typename T, bool kPrescaledRows>
Status LinearSm90::run_gated(const Call& call, const GemmConfig& tile) {
  return with_gate(weights_.activation, [&](auto activation) {
    constexpr Activation kActivation = decltype(activation)::value;
    if (tile.kernel == GemmKernel::kSmallM) {
      const auto run = [&](auto shape) {
        using Shape = decltype(shape);
        call.y_splits = kStatColumns / Shape::kColumns;
        return launch_small_m<Shape>(owner_, small_m_gated_kernel<T, Shape, kActivation, kPrescaledRows>, tile.rows,
                                     operands_of(call), arguments_of(call), call.stream);
      };
      return tile.columns == 64 ? run(SmallM64()) : run(SmallM32());
    }
    const auto kernel = tile.kernel == GemmKernel::kShared
                            ? pingpong_gated_kernel<T, kActivation, false, kPrescaledRows>
                            : pingpong_gated_kernel<T, kActivation, true, kPrescaledRows>;
    return launch_pingpong<PingPongShape>(owner_, kernel, operands_of(call),
                                          arguments_of(call, PingPongShape::kColumns), call.stream);
  });
}

template Status LinearSm90::run_gated<half_t, false>(const Call&, const GemmConfig&);
template Status LinearSm90::run_gated<half_t, true>(const Call&, const GemmConfig&);
template Status LinearSm90::run_gated<bfloat_t, false>(const Call&, const GemmConfig&);
template Status LinearSm90::run_gated<bfloat_t, true>(const Call&, const GemmConfig&);

}  // namespace embert::sm90
