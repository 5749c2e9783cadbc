// Linear layers of heads on pooled rows, in FP32: sentence-transformers' Dense modules, classification heads. Each
// launcher checks its arguments, launches on a stream and returns immediately.
#pragma once

#include <cstdint>

#include "common/launch.h"
#include "heads/task_heads.h"

namespace embert {

// A linear layer on the device. FP32 for every encoder type: nothing is rounded, and the matrix is read from the L2
// cache.
struct DenseLayer {
  DenseShape shape;
  const float* weight = nullptr;  // [out, dense_pitch(in)]
  const float* bias = nullptr;    // [out]
};

// dense.cu: y[rows, y_pitch] = activation(x[rows, dense_pitch(in)] · Wᵀ + bias). Elements past a row of x or W must be
// 0, and are set to 0 past a row of y.
Status dense(const float* x, int rows, const DenseLayer& layer, float* y, int y_pitch, const Stream& stream);

// cut.cu: y[rows, width]: rows of x truncated to their dimensions and, where requested, normalized to length 1, as
// pool.cu does. cuts: by sequence; chosen: [rows], the rows' sequences, or null: row i is sequence i's.
Status cut_rows(const float* x, const uint32_t* cuts, const int* chosen, int rows, int width, float* y,
                const Stream& stream);

}  // namespace embert
