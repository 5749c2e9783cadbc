// The launchers of LayerNorm's kernels. `T` rows are tokens, end to end; `H` is the hidden size.
#pragma once

#include "common/dtype.h"
#include "common/launch.h"
#include "ops/norm.h"

namespace embert {

// y[T, H] = LayerNorm(x); y may be x.
Status layernorm(DType dtype, const void* x, const Norm& norm, int rows, int hidden, float epsilon, void* y,
                 const Stream& stream);
bool layernorm_supports(DType dtype, int hidden);

// Raises `largest` (device memory, ≥ 0) to the largest |μ|/σ of `count` rows with row statistics.
Status row_offsets(const RowView& rows, int count, int width, float epsilon, float* largest, const Stream& stream);

}  // namespace embert
