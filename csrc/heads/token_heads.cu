// Heads with one row per token.

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "heads/heads.h"
#include "heads/inverse_length.cuh"
#include "ops/row_stats.cuh"

namespace embert {
namespace {

// Rows of tokens in FP32, unchanged (last hidden states) or normalized to length 1 (multi-vectors), of the sequences
// that request them: one warp per row.
//
// Floor for 15 000 rows of 1 024, FP16: 31 MB read and 61 MB written, 31 µs at 3 TB/s. A row's second reading comes
// from the L1 cache.

constexpr int kWarps = 4;

template <typename T, bool kUnitLength>
__global__ void __launch_bounds__(kWarps * 32)
    token_rows_kernel(const T* x, const int* chosen, int rows, int columns, float* y) {
  constexpr int kWidth = Pack<T>::kSize;
  static_assert(kWidth % 4 == 0, "a pack is stored as whole packs of FP32");
  const int lane = threadIdx.x % 32, row = blockIdx.x * kWarps + threadIdx.x / 32;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (row >= rows) return;
  const T* const from = x + size_t(chosen == nullptr ? row : chosen[row]) * columns;
  float* const to = y + size_t(row) * columns;
  float scale = 1.0f;
  if constexpr (kUnitLength) scale = inverse_length(from, columns, lane);
  for (int column = lane * kWidth; column < columns; column += 32 * kWidth) {
    const Pack<T> pack = load_pack_coherent(from + column);
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      Pack<float> floats;
#pragma unroll
      for (int k = 0; k < 4; ++k) floats.values[k] = to_float(pack.values[i + k]) * scale;
      store_pack(to + column + i, floats);
    }
  }
}

// Sparse token weights: relu(w · h + b), bge-m3's sparse head. One warp per row, in FP32. This kernel also applies the
// last LayerNorm, so h is never rounded. The order of additions is fixed: a lane's packs in order, then a butterfly.
//
// Floor for 15 000 rows of 1 024, FP16: 31 MB read, 10 µs at 3 TB/s.

constexpr int kScaleLanes = 8;  // lanes that add a row's statistics: row_stats.cuh

template <typename T>
__global__ void __launch_bounds__(kWarps * 32)
    token_weights_kernel(const RowView x, const Norm norm, float epsilon, const int* chosen, int rows, int hidden,
                         const float* weight, const float* bias, float* y) {
  constexpr int kWidth = Pack<T>::kSize;
  const int lane = threadIdx.x % 32, row = blockIdx.x * kWarps + threadIdx.x / 32;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (row >= rows) return;  // a whole warp
  const int from = chosen == nullptr ? row : chosen[row];
  const float2 scale =
      x.stats == nullptr ? float2{1.0f, 0.0f} : row_scale(x, from, hidden, epsilon, lane % kScaleLanes);
  const T* const data = static_cast<const T*>(x.data) + size_t(from) * hidden;
  float sum = 0.0f;
  for (int column = lane * kWidth; column < hidden; column += 32 * kWidth) {
    const Pack<T> pack = load_pack_coherent(data + column);
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      const Pack<float> w = load_pack(weight + column + i);
      Pack<float> gamma{}, beta{};
      if (norm.gamma != nullptr) {
        gamma = load_pack(norm.gamma + column + i);
        beta = load_pack(norm.beta + column + i);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float value = fmaf(to_float(pack.values[i + k]), scale.x, scale.y);
        if (norm.gamma != nullptr) value = fmaf(value, gamma.values[k], beta.values[k]);
        sum = fmaf(value, w.values[k], sum);
      }
    }
  }
  const float total = warp_sum(sum) + *bias;
  if (lane == 0) y[row] = total <= 0.0f ? 0.0f : total;  // NaN is preserved
}

// Logits of the rows of markers: a block per text, all of whose warps look for markers, and each of which takes every
// fourth. The order of additions is fixed, as above.

template <typename T>
__global__ void __launch_bounds__(kWarps * 32)
    marker_logits_kernel(const T* x, const int* ids, const int* cu_seqlens, const int* chosen, int marker, int hidden,
                         const float* weight, const float* bias, int columns, float* y) {
  constexpr int kWidth = Pack<T>::kSize;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int text = chosen == nullptr ? blockIdx.x : chosen[blockIdx.x], end = cu_seqlens[text + 1];
  float* const to = y + size_t(blockIdx.x) * columns;
  int found = 0;
  for (int first = cu_seqlens[text]; first < end && found < columns; first += 32) {
    unsigned markers = __ballot_sync(~0u, first + lane < end && ids[first + lane] == marker);
    for (; markers != 0 && found < columns; markers &= markers - 1, ++found) {
      if (found % kWarps != warp) continue;
      const T* const row = x + size_t(first + __ffs(markers) - 1) * hidden;
      float sum = 0.0f;
      for (int column = lane * kWidth; column < hidden; column += 32 * kWidth) {
        const Pack<T> pack = load_pack_coherent(row + column);
#pragma unroll
        for (int i = 0; i < kWidth; i += 4) {
          const Pack<float> w = load_pack(weight + column + i);
#pragma unroll
          for (int k = 0; k < 4; ++k) sum = fmaf(to_float(pack.values[i + k]), w.values[k], sum);
        }
      }
      sum = warp_sum(sum);
      if (lane == 0) to[found] = sum + *bias;
    }
  }
  for (int i = found + threadIdx.x; i < columns; i += kWarps * 32) to[i] = 0.0f;
}

}  // namespace

Status token_rows(DType dtype, const void* x, const int* chosen, int rows, int columns, bool unit_length, float* y,
                  const Stream& stream) {
  if (columns % 8 != 0) return Status::refused("token_rows: ", columns, " columns are not supported");
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const auto kernel = unit_length ? token_rows_kernel<T, true> : token_rows_kernel<T, false>;
    return launch("token_rows", kernel, (rows + kWarps - 1) / kWarps, kWarps * 32, 0, stream, static_cast<const T*>(x),
                  chosen, rows, columns, y);
  });
}

Status token_weights(DType dtype, const RowView& x, const Norm& norm, float epsilon, const int* chosen, int rows,
                     int hidden, const float* weight, const float* bias, float* y, const Stream& stream) {
  if (hidden % 8 != 0 || ((x.stats != nullptr || norm.gamma != nullptr) && hidden > kMaxStatColumns))
    return Status::refused("token_weights: hidden size ", hidden, " is not supported");
  return with_dtype(dtype, [&](auto type) {
    return launch("token_weights", token_weights_kernel<decltype(type)>, (rows + kWarps - 1) / kWarps, kWarps * 32, 0,
                  stream, x, norm, epsilon, chosen, rows, hidden, weight, bias, y);
  });
}

Status marker_logits(DType dtype, const void* x, const int* ids, const int* cu_seqlens, const int* chosen, int texts,
                     int marker, int hidden, const float* weight, const float* bias, int columns, float* y,
                     const Stream& stream) {
  if (hidden % 8 != 0) return Status::refused("marker_logits: hidden size ", hidden, " is not supported");
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return launch("marker_logits", marker_logits_kernel<T>, texts, kWarps * 32, 0, stream, static_cast<const T*>(x),
                  ids, cu_seqlens, chosen, marker, hidden, weight, bias, columns, y);
  });
}

}  // namespace embert
