// The elementwise kernels: RoPE, activations, gates, conversions. Each launcher checks its arguments, launches on a
// stream and returns immediately.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "common/launch.h"
#include "common/types.h"

namespace embert {

// The first `columns` columns of a row (queries, then keys) are heads of head_size columns. Of each head the first
// rotary_dim columns are adjacent pairs, 2j and 2j + 1, that hold elements j and j + rotary_dim/2 of the checkpoint's
// order: the rows of the weights and of the bias are permuted at load (encoder/weights.h). With (c, s) =
// table[positions[row], j] a pair (a, b) becomes (a·c − b·s, b·c + a·s), in FP32. Other columns do not change.
//
// Table and positions keep their addresses for the encoder's lifetime, so a GEMM gets them once, with its weights, and
// Linear::run has no argument for them. Each batch's first kernel writes `positions`, which may only be read after
// griddepcontrol_wait; the table is a weight. Rows past a batch's end have position 0.
struct RopeColumns {
  int head_size = 0;
  int rotary_dim = 0;              // even, at most head_size
  int columns = 0;                 // of queries and keys
  const float2* table = nullptr;   // [positions, rotary_dim / 2] cos, sin
  const int* positions = nullptr;  // [rows], counted from each text's start
};

// x[rows, columns] = activation(x), in place.
Status activate_rows(DType dtype, Activation activation, int rows, int columns, void* x, const Stream& stream);

// y[rows, columns] = activation(gate)·value, of x[rows, 2·columns]: gate, value, gate, value, …
Status gate_rows(DType dtype, Activation activation, const void* x, int rows, int columns, void* y,
                 const Stream& stream);

// Applies RoPE to queries and keys of x[rows, pitch], in place.
Status rope_rows(DType dtype, void* x, int rows, int pitch, const RopeColumns& rope, const Stream& stream);

// RMSNorms of each head's queries and keys, of head_size columns in the order of RopeColumns.
struct HeadNorms {
  const float* query = nullptr;  // [head_size]: gammas
  const float* key = nullptr;    // [head_size]
  int heads = 0;                 // of queries
  float epsilon = 0.0f;
};

// The norms of queries and keys of x[rows, pitch], then RoPE, in place. A rope.rotary_dim of 0: the norms only.
Status qk_norm_rope(DType dtype, void* x, int rows, int pitch, const HeadNorms& norms, const RopeColumns& rope,
                    const Stream& stream);
bool qk_norm_supports(DType dtype, int head_size);

// y[count] = x[count], between storage types.
Status convert(DType from, const void* x, DType to, void* y, size_t count, const Stream& stream);

}  // namespace embert
