// The epilogue of a product's sums, for up to four registers of a row.
#pragma once

#include <cstddef>

#include "cpu/products/linear.h"
#include "cpu/registers/activation.h"
#include "cpu/registers/tile.h"

namespace embert::cpu {

// Writes `count` columns of y from `sums`, which include the bias: `offset` is the offset of the first one in y.
template <int kWide>
inline void finish(const Floats (&sums)[kWide], const Epilogue& epilogue, float* y, std::ptrdiff_t offset, int count) {
  for (int lane = 0; lane < kWide; ++lane) {
    const __mmask16 mask = first_lanes(count - lane * kLanes);
    const std::ptrdiff_t place = offset + lane * kLanes;
    Floats value = activated(sums[lane], epilogue.activation);
    if (epilogue.residual) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, epilogue.residual + place));
    if (epilogue.gate) value = _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, epilogue.gate + place));
    _mm512_mask_storeu_ps(y + place, mask, value);
  }
}

}  // namespace embert::cpu
