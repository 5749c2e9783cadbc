// The largest |μ|/σ of rows before their LayerNorm, from the row statistics of their producer. It runs only while a
// model is loaded, to decide whether its LayerNorms can be folded into the GEMMs (EPILOGUES.md).

#include "common/dependent_launch.cuh"
#include "common/numeric.cuh"
#include "ops/layernorm.h"
#include "ops/row_stats.cuh"

namespace embert {
namespace {

constexpr int kThreads = 128, kLanes = 8;  // of a block, of a row

__global__ void __launch_bounds__(kThreads)
    row_offsets_kernel(const RowView rows, int count, int width, float epsilon, float* largest) {
  griddepcontrol_wait();
  const int row = (blockIdx.x * kThreads + threadIdx.x) / kLanes;
  const float offset = fabsf(row_scale(rows, min(row, count - 1), width, epsilon, threadIdx.x % kLanes).y);
  // Positive floats have the order of their bits; a NaN counts as the largest.
  atomicMax(reinterpret_cast<unsigned*>(largest), __float_as_uint(offset == offset ? offset : INFINITY));
}

}  // namespace

Status row_offsets(const RowView& rows, int count, int width, float epsilon, float* largest, const Stream& stream) {
  return launch("row_offsets", row_offsets_kernel, (count * kLanes + kThreads - 1) / kThreads, kThreads, 0, stream,
                rows, count, width, epsilon, largest);
}

}  // namespace embert
