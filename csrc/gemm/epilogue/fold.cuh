// Prepares the column constants that a GEMM's epilogue reads, once, while the model is loaded (EPILOGUES.md).
#pragma once

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "ops/norm.h"

namespace embert::sm90 {

constexpr int kFoldThreads = 128;
// Bound on the remainder of a row's sum, times kMaxOffset, relative to the row's length: a twentieth of FP16's
// rounding.
constexpr float kMaxRemainder = 1e-5f;
// Range of elements of r in which γ·r has to keep its precision. In MiniLM-L6's rows the largest element is 230, and
// none is beyond 20 deviations of its row. The limits leave a margin for other models.
constexpr float kMinElement = 0.7f, kMaxElement = 500.0f;

// The next smaller or larger value of T; not for zeros or infinities.
template <typename T>
__device__ __forceinline__ T next_representable(T value, bool below) {
  auto& bits = *reinterpret_cast<unsigned short*>(&value);
  bits += (to_float(value) > 0.0f) == below ? -1 : 1;
  return value;
}

// Rounding moves a row's sum, which should be 0, by some units in the last place. This rounds ten or fifteen elements
// of the row in the other direction, those nearest to half a unit first, until at most `enough` of the sum remains.
// Returns the remainder. For one thread.
template <typename T>
__device__ double balance(T* row, const float* exact, int count, float enough) {
  double left = 0.0;
  for (int k = 0; k < count; ++k) left += to_float(row[k]);
  for (const float least : {0.375f, 0.25f, 0.125f, 0.0f, -0.5f}) {  // the least error, in units
    for (int k = 0; k < count; ++k) {
      if (fabs(left) <= enough) return left;
      const float stored = to_float(row[k]), error = left > 0.0 ? stored - exact[k] : exact[k] - stored;
      if (stored == 0.0f || !isfinite(stored)) continue;
      const T other = next_representable(row[k], left > 0.0);
      const float step = to_float(other) - stored;
      if (error >= least * fabsf(step) && fabs(left + step) < fabs(left)) {
        row[k] = other;
        left += step;
      }
    }
  }
  return left;
}

// Sums over the block's threads; all threads get them.
__device__ __forceinline__ float2 sums_of_block(float x, float y) {
  __shared__ float2 parts[kFoldThreads / 32];
  x = warp_sum(x), y = warp_sum(y);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = {x, y};
  __syncthreads();
  float2 all = parts[0];
  for (int i = 1; i < kFoldThreads / 32; ++i) all.x += parts[i].x, all.y += parts[i].y;
  return all;
}

// Keeps the largest relative error; for one thread. Positive floats order as their bits do. A NaN counts as infinity.
__device__ __forceinline__ void raise_error(float* worst, float squared_error, float squares) {
  if (squares <= 0.0f && squared_error == 0.0f) return;
  const float error = sqrtf(squared_error / squares);
  atomicMax(reinterpret_cast<unsigned*>(worst), __float_as_uint(error == error ? error : INFINITY));
}

// One block for a row of W, a column of y. Without a Norm the column's constant is factor·bias. With one, W[n, k]
// becomes γ[k]·W[n, k] minus the row's mean of those, rounded so that the row's sum is 0 except for a small remainder
// (balance). The constant is then factor·(bias + Σ W·β), in FP32. `worst` keeps the largest relative error of this
// rounding over all rows of W, for rows of x with |μ|/σ of up to kMaxOffset. With `rms` the mean stays, and so does
// what remains of it.
template <typename T>
__global__ void __launch_bounds__(kFoldThreads)
    fold_input_kernel(T* weight, const float* unrounded, const float* bias, const Norm norm, bool rms, int in,
                      float factor, float* columns, float* worst) {
  __shared__ float exact[kMaxStatColumns];
  __shared__ float left;
  griddepcontrol_wait();
  const int n = blockIdx.x;
  if (norm.gamma == nullptr) {
    if (threadIdx.x == 0) columns[n] = factor * bias[n];
    return;
  }
  T* const row = weight + size_t(n) * in;
  float sum = 0.0f, shift = 0.0f;
  for (int k = threadIdx.x; k < in; k += kFoldThreads) {
    const float w = unrounded[size_t(n) * in + k];
    exact[k] = w * norm.gamma[k];
    sum += exact[k];
    shift = fmaf(w, norm.beta[k], shift);
  }
  const float2 sums = sums_of_block(sum, shift);
  float squares = 0.0f, squared_error = 0.0f;
  for (int k = threadIdx.x; k < in; k += kFoldThreads) {
    if (!rms) exact[k] -= sums.x / in;
    row[k] = from_float<T>(exact[k]);
    squares = fmaf(exact[k], exact[k], squares);
  }
  squares = sums_of_block(squares, 0.0f).x;
  if (threadIdx.x == 0) left = rms ? 0.0f : float(balance(row, exact, in, kMaxRemainder * sqrtf(squares) / kMaxOffset));
  __syncthreads();
  for (int k = threadIdx.x; k < in; k += kFoldThreads) {
    const float error = to_float(row[k]) - exact[k];
    squared_error = fmaf(error, error, squared_error);
  }
  squared_error = sums_of_block(squared_error, 0.0f).x;
  if (threadIdx.x != 0) return;
  columns[n] = factor * (bias[n] + sums.y);
  const float offset_error = kMaxOffset * left;
  raise_error(worst, fmaf(offset_error, offset_error, squared_error), squares);
}

// The same for prescaled rows: W does not change, and the column's constants are {Σ γ·W, factor·(bias + Σ W·β)}.
// `worst` keeps the error of storing γ·r, for kMinElement and kMaxElement.
template <typename T>
__global__ void __launch_bounds__(kFoldThreads) sum_input_kernel(const T* weight, const float* bias, const Norm norm,
                                                                 int in, float factor, float2* columns, float* worst) {
  griddepcontrol_wait();
  const int n = blockIdx.x;
  float sum = 0.0f, shift = 0.0f;
  for (int k = threadIdx.x; k < in; k += kFoldThreads) {
    const float w = to_float(weight[size_t(n) * in + k]);
    sum = fmaf(w, norm.gamma[k], sum);
    shift = fmaf(w, norm.beta[k], shift);
  }
  const float2 sums = sums_of_block(sum, shift);
  if (threadIdx.x == 0) columns[n] = {sums.x, factor * (bias[n] + sums.y)};
  if (n > 0) return;
  for (const float r : {kMinElement, kMaxElement}) {
    float squares = 0.0f, squared_error = 0.0f;
    for (int k = threadIdx.x; k < in; k += kFoldThreads) {
      const float exact = norm.gamma[k] * r, error = to_float(from_float<T>(exact)) - exact;
      squares = fmaf(exact, exact, squares);
      squared_error = fmaf(error, error, squared_error);
    }
    const float2 all = sums_of_block(squared_error, squares);
    if (threadIdx.x == 0) raise_error(worst, all.x, all.y);
  }
}

// columns: {γ, bias + β} of the residual's LayerNorm, {1/γ, bias} of an RMSNorm's prescaled rows, or {1, bias} without
// one. next: the gamma that multiplies y with prescaled rows, or 1.
template <typename T>
__global__ void __launch_bounds__(kFoldThreads)
    fold_residual_kernel(const float* bias, const Norm norm, bool rms, const float* next_gamma, int out,
                         float2* columns, T* next) {
  griddepcontrol_wait();
  const int n = blockIdx.x * kFoldThreads + threadIdx.x;
  if (n >= out) return;
  next[n] = from_float<T>(next_gamma == nullptr ? 1.0f : next_gamma[n]);
  columns[n] = norm.gamma == nullptr ? float2{1.0f, bias[n]}
               : rms                 ? float2{1.0f / norm.gamma[n], bias[n]}
                                     : float2{norm.gamma[n], bias[n] + norm.beta[n]};
}

}  // namespace embert::sm90
