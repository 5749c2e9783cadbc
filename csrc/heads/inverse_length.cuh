// The factor that scales a token's vector to length 1.
#pragma once

#include "common/numeric.cuh"

namespace embert {

// 1 / length of a row of `columns`, a multiple of a pack, in every lane of the warp. In FP32, in a fixed order.
template <typename T>
__device__ __forceinline__ float inverse_length(const T* row, int columns, int lane) {
  constexpr int kWidth = Pack<T>::kSize;
  float square = 0.0f;
  for (int column = lane * kWidth; column < columns; column += 32 * kWidth) {
    const Pack<T> pack = load_pack_coherent(row + column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) square = fmaf(to_float(pack.values[i]), to_float(pack.values[i]), square);
  }
  return 1.0f / fmaxf(sqrtf(warp_sum(square)), 1e-12f);
}

}  // namespace embert
