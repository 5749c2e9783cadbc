// The epilogue of a product's sums, for up to four registers of a row.
#pragma once

#include <cstddef>

#include "cpu/products/linear.h"
#include "cpu/registers/activation.h"
#include "cpu/registers/tile.h"

namespace embert::cpu {

// Writes `count` columns of y from `sums`, which include the bias: `at` is the offset of the first one in y.
template <int kWide>
inline void finish(const Floats (&sums)[kWide], const Following& following, float* y, std::ptrdiff_t at, int count) {
  for (int lane = 0; lane < kWide; ++lane) {
    const __mmask16 mask = first_lanes(count - lane * kLanes);
    const std::ptrdiff_t place = at + lane * kLanes;
    Floats value = activated(sums[lane], following.activation);
    if (following.residual) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, following.residual + place));
    if (following.gate) value = _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, following.gate + place));
    _mm512_mask_storeu_ps(y + place, mask, value);
  }
}

}  // namespace embert::cpu
