// Launches the kernels with RoPE or gates.

#include "gemm/kernels/gated.cuh"
#include "gemm/kernels/rope.cuh"
#include "gemm/kernels/sm90.h"
#include "gemm/kernels/sm90_launch.cuh"

namespace embert::sm90 {

template <typename T, bool kPrescaledRows>
Status LinearSm90::run_rope(const Call& call, const GemmConfig& tile) {
  if (tile.kernel == GemmKernel::kSmallM) {
    if (tile.columns == 64)
      return launch_small_m<SmallM64>(call, small_m_rope_kernel<T, SmallM64, kPrescaledRows>, rope_);
    return launch_small_m<SmallM32>(call, small_m_rope_kernel<T, SmallM32, kPrescaledRows>, rope_);
  }
  if (tile.kernel == GemmKernel::kShared)
    return launch_pingpong(call, pingpong_rope_kernel<T, false, kPrescaledRows>, rope_);
  return launch_pingpong(call, pingpong_rope_kernel<T, true, kPrescaledRows>, rope_);
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
      if (tile.columns == 64)
        return launch_small_m<SmallM64>(call, small_m_gated_kernel<T, SmallM64, kActivation, kPrescaledRows>);
      return launch_small_m<SmallM32>(call, small_m_gated_kernel<T, SmallM32, kActivation, kPrescaledRows>);
    }
    if (tile.kernel == GemmKernel::kShared)
      return launch_pingpong(call, pingpong_gated_kernel<T, kActivation, false, kPrescaledRows>);
    return launch_pingpong(call, pingpong_gated_kernel<T, kActivation, true, kPrescaledRows>);
  });
}

template Status LinearSm90::run_gated<half_t, false>(const Call&, const GemmConfig&);
template Status LinearSm90::run_gated<half_t, true>(const Call&, const GemmConfig&);
template Status LinearSm90::run_gated<bfloat_t, false>(const Call&, const GemmConfig&);
template Status LinearSm90::run_gated<bfloat_t, true>(const Call&, const GemmConfig&);

}  // namespace embert::sm90
