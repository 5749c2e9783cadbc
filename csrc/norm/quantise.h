// Rows in 8 bits, for products whose operands are rotated integers (EPILOGUES.md): each block of 128 columns times the
// Sylvester-Hadamard matrix of order 128, then rounded to -127 … 127 by a scale of the row.
#pragma once

#include <cstdint>

#include "device/dtype.h"
#include "device/launch.h"
#include "norm/norm.h"

namespace embert {

constexpr int kRotated = 128;  // columns of a block; rows and weights have a multiple of them
constexpr int kMostQuantised = 8192;  // columns of a row; kMaxSumColumns with a LayerNorm

// Memory for them.
struct QuantisedRows {
  int8_t* data = nullptr;   // [rows, columns]
  float* scales = nullptr;  // [rows]
};

// Whether rows of so many columns can be quantised, with or without a LayerNorm before.
constexpr bool quantise_takes(int columns, bool normed) {
  return columns > 0 && columns % kRotated == 0 && columns <= (normed ? kMaxSumColumns : kMostQuantised);
}

// With m the largest magnitude of a row's rotated, unscaled elements y, in FP32 throughout: q = rint(y · (127 / m)),
// half to even, and a scale of m / 127 / √128. The butterfly's strides are 1, 2, 4 … 64. A row of zeros has scale 0; a
// row that is not finite has a scale that is not. x with sums: its LayerNorm is applied first.
Status quantise_rows(DType dtype, const Rows& x, const Norm& norm, int rows, int columns, float epsilon,
                     const QuantisedRows& to, const Stream& stream);

}  // namespace embert
