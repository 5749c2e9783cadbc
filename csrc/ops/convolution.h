// The gated short convolution over packed rows.
#pragma once

#include "common/launch.h"
#include "common/types.h"
#include "ops/attention_work.h"

namespace embert {

constexpr int kMaxTaps = 64;

struct Taps {
  const float* weight = nullptr;  // [taps, hidden], from the earliest row's on
  const float* bias = nullptr;    // [hidden]
};

struct Convolution {
  int taps, after;  // rows that each row reads, itself included; of these, rows after it
  Taps weights;
};

// y[rows, hidden] = c · (Σ taps · (b · x) + bias), of rows (b, c, x) of x[rows, 3 · hidden]: each column by its taps,
// over the rows of one text. positions: [rows], counted from each text's start.
Status convolve_rows(DType dtype, const void* x, const int* positions, const Convolution& convolution, int rows,
                     int hidden, void* y, const Stream& stream);

// Rows of tokens that are not attended to become what a row of zeros is multiplied to: `bias` [3 · hidden].
Status clear_hidden_rows(DType dtype, const AttentionTile* tiles, int count, const float* bias, int hidden, void* x,
                         const Stream& stream);

}  // namespace embert
