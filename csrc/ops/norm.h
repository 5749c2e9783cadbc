// LayerNorms, and rows whose LayerNorm is applied by their reader (EPILOGUES.md). `T` rows are tokens, end to end; `H`
// is the hidden size.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "common/launch.h"
#include "common/types.h"

namespace embert {

// A LayerNorm, or an RMSNorm, whose beta is not used. Like all vectors of a model it is in FP32: rounding gamma to FP16
// costs more than rounding all matrices (docs/encoder.md).
struct Norm {
  const float* gamma = nullptr;  // [columns]; null: none
  const float* beta = nullptr;   // [columns]
};

// Rows of a matrix. With `sums` they are not normalized yet; they may be prescaled with their LayerNorm's gamma. For
// each row and each group of 128 columns there are then `parts` (1, 2, 4 or 8) sums of elements (x) and of their
// squares (y), in the order of the columns.
struct RowView {
  const void* data = nullptr;
  const float2* stats = nullptr;
  int splits = 1;
  // Not null: `data` is int8 in blocks, and these are the blocks' maxima (ops/quantize.h).
  const void* maxima = nullptr;
};

constexpr int kStatColumns = 128;      // of a group
constexpr int kMaxStatColumns = 1024;  // of a row: eight groups with four lanes each are a warp

// The largest |μ|/σ of a row for which σ² = Σr²/n − μ² is accurate enough. At 30 the subtraction costs σ some 900
// roundings of FP32, 5e-5, a quarter of one of FP16. MiniLM's rows stay below 0.1.
constexpr float kMaxOffset = 30.0f;

// Sums of the statistics of `rows` rows: one part a group, or up to eight parts for few rows.
inline size_t stats_count(int rows, int columns) {
  return size_t(rows) * ((columns + kStatColumns - 1) / kStatColumns) + (1 << 18);
}

// y[T, H] = LayerNorm(x); y may be x.
Status layernorm(DType dtype, const void* x, const Norm& norm, int rows, int hidden, float epsilon, void* y,
                 const Stream& stream);
bool layernorm_supports(DType dtype, int hidden);

constexpr int max_rms_columns(DType dtype) {
  return 8192 / bytes_of(dtype);  // as many as heads/pool.cu has threads for
}

// y[T, H] = x / sqrt(mean(x²) + epsilon) · gamma: RMSNorm; y may be x.
Status rmsnorm(DType dtype, const void* x, const float* gamma, int rows, int hidden, float epsilon, void* y,
               const Stream& stream);
// y[T, H] += RMSNorm(x). y_stats: null, or the destination of y's row statistics before rounding, one part a group.
// Rows of y are stored multiplied by factors: `before` the call and `after` it.
Status add_rmsnorm(DType dtype, const void* x, const float* gamma, int rows, int hidden, float epsilon, void* y,
                   const float* before, const float* after, float2* y_stats, const Stream& stream);
// y[T, H] *= RMSNorm(x).
Status multiply_rmsnorm(DType dtype, const void* x, const float* gamma, int rows, int hidden, float epsilon, void* y,
                        const Stream& stream);
bool rmsnorm_supports(DType dtype, int hidden);

// Divides a gamma between W[rows, columns] and its input rows: W's columns are multiplied by powers of two, or 0, which
// rounds nothing, and gamma becomes the factor of the rows: the rest, whose magnitude is in [1, 2).
Status split_gamma(DType dtype, void* weight, float* gamma, int rows, int columns, const Stream& stream);

// Raises `largest` (device memory, ≥ 0) to the largest |μ|/σ of `count` rows with row statistics.
Status row_offsets(const RowView& rows, int count, int width, float epsilon, float* largest, const Stream& stream);

}  // namespace embert
