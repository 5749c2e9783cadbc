// What a product's epilogue reads for each column of y, prepared once when the model is loaded (../EPILOGUES.md).
#pragma once

#include "../kernels/numeric.cuh"
#include "gemm.h"

namespace embert::hopper {

constexpr int kFoldThreads = 128;

// A block a row of W (a column of y). Without a Norm: {0, factor·bias}. With one: W[n, k] becomes fp16(γ[k]·W[n, k]),
// and the column is {Σ of those, factor·(bias + Σ W·β)}, both of FP32. `worst` keeps the largest relative error that
// the rounding of a row's γ·W made.
template <typename T>
__global__ void __launch_bounds__(kFoldThreads)
    fold_input_kernel(T* weight, const T* bias, const T* gamma, const T* beta, int in, float factor, float2* columns,
                      float* worst) {
  wait_for_earlier_kernels();
  const int n = blockIdx.x;
  T* const row = weight + size_t(n) * in;
  float sum = 0.0f, shift = 0.0f, wanted = 0.0f, missed = 0.0f;
  if (gamma != nullptr) {
    for (int k = threadIdx.x; k < in; k += kFoldThreads) {
      const float w = to_float(row[k]);
      const float scaled = w * to_float(gamma[k]);
      const T stored = from_float<T>(scaled);
      const float error = to_float(stored) - scaled;
      row[k] = stored;
      sum += to_float(stored);
      shift = fmaf(w, to_float(beta[k]), shift);
      wanted = fmaf(scaled, scaled, wanted);
      missed = fmaf(error, error, missed);
    }
  }
  __shared__ float4 parts[kFoldThreads / 32];
  sum = warp_sum(sum), shift = warp_sum(shift), wanted = warp_sum(wanted), missed = warp_sum(missed);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = {sum, shift, wanted, missed};
  __syncthreads();
  if (threadIdx.x != 0) return;
  float4 all = parts[0];
  for (int i = 1; i < kFoldThreads / 32; ++i) {
    all.x += parts[i].x, all.y += parts[i].y, all.z += parts[i].z, all.w += parts[i].w;
  }
  columns[n] = {all.x, factor * (to_float(bias[n]) + all.y)};
  if (all.z > 0.0f || all.w != 0.0f) {  // positive floats order as their bits do; a NaN counts as the largest
    const float error = sqrtf(all.w / all.z);
    atomicMax(reinterpret_cast<unsigned*>(worst), __float_as_uint(error == error ? error : INFINITY));
  }
}

// {γ, bias + β} of the residual's LayerNorm; {1, bias} without one.
template <typename T>
__global__ void __launch_bounds__(kFoldThreads)
    fold_residual_kernel(const T* bias, const T* gamma, const T* beta, int out, float2* columns) {
  wait_for_earlier_kernels();
  const int n = blockIdx.x * kFoldThreads + threadIdx.x;
  if (n >= out) return;
  const float b = to_float(bias[n]);
  columns[n] = gamma == nullptr ? float2{1.0f, b} : float2{to_float(gamma[n]), b + to_float(beta[n])};
}

}  // namespace embert::hopper
