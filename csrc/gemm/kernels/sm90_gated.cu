// Launches inner products that gate (gemm/kernels/gated.cuh).

#include "gemm/kernels/gated.cuh"
#include "gemm/kernels/sm90.h"
#include "gemm/kernels/sm90_launch.cuh"

namespace embert::hopper {

template <typename T, bool kGammaInRows>
Status HopperLinear::run_gated(const Call& call, const TileChoice& tile) {
  return with_gate(weights_.activation, [&](auto activation) {
    constexpr Activation kActivation = decltype(activation)::value;
    if (tile.kernel == TileKernel::kFewRows) {
      if (tile.columns == 64)
        return launch_few<FewMiddle>(call, few_rows_gated_kernel<T, FewMiddle, kActivation, kGammaInRows>);
      return launch_few<FewNarrow>(call, few_rows_gated_kernel<T, FewNarrow, kActivation, kGammaInRows>);
    }
    if (tile.kernel == TileKernel::kShared)
      return launch_pingpong(call, pingpong_gated_kernel<T, kActivation, false, kGammaInRows>);
    return launch_pingpong(call, pingpong_gated_kernel<T, kActivation, true, kGammaInRows>);
  });
}

template Status HopperLinear::run_gated<half_t, false>(const Call&, const TileChoice&);
template Status HopperLinear::run_gated<half_t, true>(const Call&, const TileChoice&);
template Status HopperLinear::run_gated<bfloat_t, false>(const Call&, const TileChoice&);
template Status HopperLinear::run_gated<bfloat_t, true>(const Call&, const TileChoice&);

}  // namespace embert::hopper
