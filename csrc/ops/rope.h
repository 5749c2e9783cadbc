// RoPE: which columns of queries and keys are rotated, and by which angles.
#pragma once

#include <cuda_runtime_api.h>

namespace embert {

// The first `columns` columns of a row (queries, then keys) are heads of head_size columns. Of each head the first
// rotary_dim columns are adjacent pairs, 2j and 2j + 1, that hold elements j and j + rotary_dim/2 of the checkpoint's
// order: the rows of the weights and of the bias are permuted at load (encoder/row_order.h). With (c, s) =
// table[positions[row], j] a pair (a, b) becomes (a·c − b·s, b·c + a·s), in FP32. Other columns do not change.
//
// Table and positions keep their addresses for the encoder's lifetime, so a GEMM gets them once, with its weights, and
// Linear::run has no argument for them. Each batch's first kernel writes `positions`, which may only be read after
// griddepcontrol_wait; the table is a weight. Rows past a batch's end have position 0.
struct RopeColumns {
  int head_size = 0;
  int rotary_dim = 0;              // even, at most head_size
  int columns = 0;                 // 2·hidden
  const float2* table = nullptr;   // [positions, rotary_dim / 2] cos, sin
  const int* positions = nullptr;  // [rows], counted from each text's start
};

}  // namespace embert
