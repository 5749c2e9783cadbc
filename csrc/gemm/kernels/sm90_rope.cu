// Launches products that turn queries and keys (gemm/kernels/rope.cuh).

#include "gemm/kernels/rope.cuh"
#include "gemm/kernels/sm90.h"
#include "gemm/kernels/sm90_launch.cuh"

namespace embert::hopper {

template <typename T, bool kGammaInRows>
Status HopperLinear::run_rotary(const Call& call, const TileChoice& tile) {
  if (tile.kernel == TileKernel::kFewRows) {
    if (tile.columns == 64)
      return launch_few<FewMiddle>(call, few_rows_rotary_kernel<T, FewMiddle, kGammaInRows>, rotary_);
    return launch_few<FewNarrow>(call, few_rows_rotary_kernel<T, FewNarrow, kGammaInRows>, rotary_);
  }
  if (tile.kernel == TileKernel::kShared)
    return launch_pingpong(call, pingpong_rotary_kernel<T, false, kGammaInRows>, rotary_);
  return launch_pingpong(call, pingpong_rotary_kernel<T, true, kGammaInRows>, rotary_);
}

template Status HopperLinear::run_rotary<half_t, false>(const Call&, const TileChoice&);
template Status HopperLinear::run_rotary<half_t, true>(const Call&, const TileChoice&);
template Status HopperLinear::run_rotary<bfloat_t, false>(const Call&, const TileChoice&);
template Status HopperLinear::run_rotary<bfloat_t, true>(const Call&, const TileChoice&);

}  // namespace embert::hopper
