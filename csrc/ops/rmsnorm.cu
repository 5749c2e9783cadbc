// y = RMSNorm(x), y += RMSNorm(x), and y *= RMSNorm(x): a block per row, or a warp where a row has at most 64 packs.
// Everything between load and store is in FP32 registers.
//
// Floor for 26 361 rows of 1 024, FP16: x read and y written, 108 MB, 36 µs at 3 TB/s; half as much again for a sum.
// Measured for rows of 512 within a forward pass, a sum: 43 µs, with a block per row 51; a product 29 and 37 (H100).

#include <type_traits>

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "ops/norm.h"

namespace embert {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32, kMaxPacks = 4;
static_assert(max_rms_columns(DType::kFloat32) == kThreads * kMaxPacks * Pack<float>::kSize, "packs of a thread");

// The sums over a row's threads, a block or a warp, in one order for all of them.
template <int kRowThreads>
__device__ __forceinline__ float2 row_sums(float2 sums) {
  if constexpr (kRowThreads == 32) {
    return {warp_sum(sums.x), warp_sum(sums.y)};
  } else {
    __shared__ float2 parts[kWarps];
    sums = {warp_sum(sums.x), warp_sum(sums.y)};
    __syncthreads();  // an earlier call's parts have been read
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sums;
    __syncthreads();
    static_assert(kWarps == 4, "a tree");
    return {(parts[0].x + parts[1].x) + (parts[2].x + parts[3].x),
            (parts[0].y + parts[1].y) + (parts[2].y + parts[3].y)};
  }
}

enum class Result { kNorm, kSum, kProduct };

// A thread has packs t, t + kRowThreads, … of its row.
template <typename T, int kPacks, Result kResult, int kRowThreads>
__global__ void __launch_bounds__(kThreads)
    rmsnorm_kernel(const T* x, const float* gamma, int hidden, float epsilon, T* y, const float* before,
                   const float* after, float2* y_stats, int rows) {
  constexpr int kWidth = Pack<T>::kSize;
  constexpr bool kAdds = kResult == Result::kSum, kReads = kResult != Result::kNorm;
  constexpr int kRows = kThreads / kRowThreads;  // of a block
  const unsigned row = kRows == 1 ? blockIdx.x : blockIdx.x * kRows + threadIdx.x / kRowThreads;
  const unsigned thread = kRows == 1 ? threadIdx.x : threadIdx.x % kRowThreads;
  const size_t start = size_t(row) * hidden;
  const auto column_of = [&](int pack) { return (pack * kRowThreads + int(thread)) * kWidth; };
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  if (kRows > 1 && int(row) >= rows) return;
  Pack<T> values[kPacks], residuals[kReads ? kPacks : 1];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (column_of(p) >= hidden) continue;
    values[p] = load_pack_coherent(x + start + column_of(p));
    if constexpr (kReads) residuals[p] = load_pack_coherent(y + start + column_of(p));
  }
  float squares = 0.0f;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (column_of(p) >= hidden) continue;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float value = to_float(values[p].values[i]);
      squares = fmaf(value, value, squares);
    }
  }
  const float scale = rsqrtf(row_sums<kRowThreads>({0.0f, squares}).y / hidden + epsilon);
  float2 sums = {0.0f, 0.0f};  // of y
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (column_of(p) >= hidden) continue;
    Pack<T> out;
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      const Pack<float> four = load_pack(gamma + column_of(p) + i);
      Pack<float> divisors, factors;
      if constexpr (kAdds) {
        if (before != nullptr) divisors = load_pack(before + column_of(p) + i);
        if (after != nullptr) factors = load_pack(after + column_of(p) + i);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float value = to_float(values[p].values[i + k]) * scale * four.values[k];
        if constexpr (kAdds) {
          const float residual = to_float(residuals[p].values[i + k]);
          value += before == nullptr ? residual : __fdividef(residual, divisors.values[k]);
          sums = {sums.x + value, fmaf(value, value, sums.y)};
          if (after != nullptr) value *= factors.values[k];
        }
        if constexpr (kResult == Result::kProduct) value *= to_float(residuals[p].values[i + k]);
        out.values[i + k] = from_float<T>(value);
      }
    }
    store_pack(y + start + column_of(p), out);
  }
  if constexpr (kAdds) {
    if (y_stats == nullptr) return;
    sums = row_sums<kRowThreads>(sums);
    const int groups = (hidden + kStatColumns - 1) / kStatColumns;
    for (int group = thread; group < groups; group += kRowThreads)
      y_stats[size_t(row) * groups + group] = group == 0 ? sums : float2{0.0f, 0.0f};
  }
}

// The sign and the mantissa of a gamma; 1 for a gamma of 0, and for a subnormal one.
__device__ __forceinline__ float factor_of_rows(float gamma) {
  const unsigned bits = __float_as_uint(gamma);
  return (bits & 0x7F800000u) == 0 ? 1.0f : __uint_as_float((bits & 0x807FFFFFu) | 0x3F800000u);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) scale_columns_kernel(T* weight, const float* gamma, int columns) {
  griddepcontrol_wait();
  T* const row = weight + size_t(blockIdx.x) * columns;
  for (int k = threadIdx.x; k < columns; k += kThreads)
    row[k] = from_float<T>(to_float(row[k]) * (gamma[k] / factor_of_rows(gamma[k])));
}

__global__ void __launch_bounds__(kThreads) factors_of_rows_kernel(float* gamma, int columns) {
  griddepcontrol_wait();
  for (int k = threadIdx.x; k < columns; k += kThreads) gamma[k] = factor_of_rows(gamma[k]);
}

template <Result kResult>
Status run_rmsnorm(DType dtype, const void* x, const float* gamma, int rows, int hidden, float epsilon, void* y,
                   const float* before, const float* after, float2* y_stats, const Stream& stream) {
  if (!rmsnorm_supports(dtype, hidden)) return Status::refused("rmsnorm: hidden size ", hidden, " is not supported");
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const auto run_with = [&](auto packs, auto row_threads) {
      constexpr int kRows = kThreads / row_threads;
      return launch("rmsnorm", rmsnorm_kernel<T, packs, kResult, row_threads>, (rows + kRows - 1) / kRows, kThreads, 0,
                    stream, static_cast<const T*>(x), gamma, hidden, epsilon, static_cast<T*>(y), before, after,
                    y_stats, rows);
    };
    if (hidden <= 2 * 32 * Pack<T>::kSize)
      return run_with(std::integral_constant<int, 2>(), std::integral_constant<int, 32>());
    const auto run = [&](auto packs) { return run_with(packs, std::integral_constant<int, kThreads>()); };
    const int packs = (hidden + kThreads * Pack<T>::kSize - 1) / (kThreads * Pack<T>::kSize);
    return with_constant<1, 2, kMaxPacks>(packs, run);
  });
}

}  // namespace

bool rmsnorm_supports(DType dtype, int hidden) {
  return hidden > 0 && hidden % (16 / bytes_of(dtype)) == 0 && hidden <= max_rms_columns(dtype);
}

Status rmsnorm(DType dtype, const void* x, const float* gamma, int rows, int hidden, float epsilon, void* y,
               const Stream& stream) {
  return run_rmsnorm<Result::kNorm>(dtype, x, gamma, rows, hidden, epsilon, y, nullptr, nullptr, nullptr, stream);
}

Status add_rmsnorm(DType dtype, const void* x, const float* gamma, int rows, int hidden, float epsilon, void* y,
                   const float* before, const float* after, float2* y_stats, const Stream& stream) {
  return run_rmsnorm<Result::kSum>(dtype, x, gamma, rows, hidden, epsilon, y, before, after, y_stats, stream);
}

Status multiply_rmsnorm(DType dtype, const void* x, const float* gamma, int rows, int hidden, float epsilon, void* y,
                        const Stream& stream) {
  return run_rmsnorm<Result::kProduct>(dtype, x, gamma, rows, hidden, epsilon, y, nullptr, nullptr, nullptr, stream);
}

Status split_gamma(DType dtype, void* weight, float* gamma, int rows, int columns, const Stream& stream) {
  EMBERT_TRY(with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return launch("scale_columns", scale_columns_kernel<T>, rows, kThreads, 0, stream, static_cast<T*>(weight), gamma,
                  columns);
  }));
  return launch("factors_of_rows", factors_of_rows_kernel, 1, kThreads, 0, stream, gamma, columns);
}

}  // namespace embert
