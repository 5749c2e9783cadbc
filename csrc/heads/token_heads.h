// Heads with one row per token. chosen: [rows], the row of x for each row of y; null: the first `rows` ones. Each
// launcher checks its arguments, launches on a stream and returns immediately.
#pragma once

#include "common/dtype.h"
#include "common/launch.h"
#include "ops/norm.h"

namespace embert {

// token_rows.cu: y[rows, columns] = rows of x in FP32, unchanged or normalized to length 1.
Status token_rows(DType dtype, const void* x, const int* chosen, int rows, int columns, bool unit_length, float* y,
                  const Stream& stream);

// token_weights.cu: y[rows] = relu(weight · h + bias), h a row of x after `norm`, which is applied to rows with row
// statistics. weight: [hidden]; bias: [1], on the device.
Status token_weights(DType dtype, const RowView& x, const Norm& norm, float epsilon, const int* chosen, int rows,
                     int hidden, const float* weight, const float* bias, float* y, const Stream& stream);

}  // namespace embert
