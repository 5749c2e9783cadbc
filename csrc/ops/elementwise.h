// The elementwise kernels: RoPE, activations, gates, conversions. Each launcher checks its arguments, launches on a
// stream and returns immediately.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

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

// The norms of queries and keys of x[rows, pitch], then RoPE, in place. A rope.rotary_dim of 0: the norms only. Of
// `values` heads of values that follow the keys, a norm without gamma.
Status qk_norm_rope(DType dtype, void* x, int rows, int pitch, const HeadNorms& norms, const RopeColumns& rope,
                    int values, const Stream& stream);
bool qk_norm_supports(DType dtype, int head_size);

// y[count] = x[count], between storage types.
Status convert(DType from, const void* x, DType to, void* y, size_t count, const Stream& stream);

// Elements that are converted to the device's type at a time: 16 MB in FP32.
constexpr size_t kConvertedElements = size_t(4) << 20;

// Copies elements of host memory to the device, between storage types. `conversion`: device memory for
// kConvertedElements of them, or for `count`.
inline Status upload(const void* host, size_t count, DType stored, void* to, DType dtype, void* conversion,
                     const Stream& stream) {
  const size_t at_once = stored == dtype ? count : kConvertedElements;
  for (size_t first = 0; first < count; first += at_once) {
    const size_t some = std::min(count - first, at_once);
    auto* const target = static_cast<uint8_t*>(to) + first * bytes_of(dtype);
    void* const landing = stored == dtype ? target : conversion;
    EMBERT_CUDA(cudaMemcpyAsync(landing, static_cast<const uint8_t*>(host) + first * bytes_of(stored),
                                some * bytes_of(stored), cudaMemcpyHostToDevice, stream.handle));
    if (stored != dtype) EMBERT_TRY(convert(stored, landing, dtype, target, some, stream));
  }
  return {};
}

}  // namespace embert
