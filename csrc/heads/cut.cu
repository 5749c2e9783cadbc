// The end of pool.cu, for rows that went through Dense modules: truncated to the requested dimensions (Matryoshka) and
// normalized to length 1. One block per row; the launch is the cost.

#include "common/dependent_launch.cuh"
#include "common/numeric.cuh"
#include "heads/dense.h"
#include "heads/pooling.h"

namespace embert {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    cut_kernel(const float* x, const uint32_t* cuts, const int* chosen, int width, float* y) {
  __shared__ float squares[kThreads / 32];
  const size_t start = size_t(blockIdx.x) * width;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const uint32_t cut = cuts[chosen == nullptr ? blockIdx.x : chosen[blockIdx.x]];
  const int prefetched = int(cut & ~kCutKeepsLength);
  const int dimensions = prefetched == 0 ? width : min(prefetched, width);
  float square = 0.0f;
  for (int column = threadIdx.x; column < dimensions; column += kThreads)
    square = fmaf(x[start + column], x[start + column], square);
  square = warp_sum(square);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
  __syncthreads();
  float scale = 1.0f;
  if ((cut & kCutKeepsLength) == 0) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) total += squares[i];
    scale = 1.0f / fmaxf(sqrtf(total), 1e-12f);
  }
  for (int column = threadIdx.x; column < width; column += kThreads)
    y[start + column] = column < dimensions ? x[start + column] * scale : 0.0f;
}

}  // namespace

Status cut_rows(const float* x, const uint32_t* cuts, const int* chosen, int rows, int width, float* y,
                const Stream& stream) {
  if (x == y) return Status::refused("cut: rows cannot be cut in place");
  return launch("cut", cut_kernel, rows, kThreads, 0, stream, x, cuts, chosen, width, y);
}

}  // namespace embert
