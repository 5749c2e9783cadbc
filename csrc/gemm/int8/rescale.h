// Sums of integers of 8 bits become rows in FP16 (EPILOGUES.md): what the portable products do after multiplying.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "ops/activation.h"
#include "ops/norm.h"

namespace embert {

// x·Wᵀ of integers, and what makes x·Wᵀ + bias of it.
struct IntegerSums {
  const int32_t* sums;         // [rows, out]
  const float* row_scales;     // [rows] of x
  const float* column_scales;  // [out]
  const float* bias;           // [out]
  int rows, out;               // out: a multiple of 8
};

// y[rows, out] = activation(x·Wᵀ + bias), in FP16.
Status rescale_rows(const IntegerSums& of, Activation activation, void* y, const Stream& stream);

// y[rows, out] = x·Wᵀ + bias + LN(residual), in FP16, and the sums of y's rows with one part a group. `out` is at most
// kMaxStatColumns. y is not the residual.
Status rescale_onto_residual(const IntegerSums& of, const RowView& residual, const Norm& norm, float epsilon, void* y,
                             float2* y_stats, const Stream& stream);

}  // namespace embert
