// y = LayerNorm(x): one warp per row, everything between load and store in FP32 registers.
//
// Floor for 26 692 rows of 768, FP16: x read and y written, 82 MB, 27 µs at 3 TB/s.

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "ops/norm.h"
#include "ops/row_stats.cuh"
#include "ops/warp_row.cuh"

namespace embert {
namespace {

constexpr int kWarps = 4;

template <typename T, int kPacks>
__global__ void __launch_bounds__(kWarps * 32)
    layernorm_kernel(const T* x, const Norm norm, int rows, int hidden, float epsilon, T* y) {
  const int lane = threadIdx.x % 32;
  const int row = blockIdx.x * kWarps + threadIdx.x / 32;
  griddepcontrol_launch_dependents();
  WarpRow<T, kPacks> values, gamma, beta;
  gamma.load_vector(norm.gamma, lane, hidden);
  beta.load_vector(norm.beta, lane, hidden);
  values.clear();
  griddepcontrol_wait();
  if (row >= rows) return;
  const size_t start = size_t(row) * hidden;
  Pack<T> packs[kPacks];
  load_row(packs, x + start, lane, hidden);
  values.add(packs, lane, hidden);
  values.normalize_into(y + start, gamma, beta, lane, hidden, epsilon);
}

// The largest |μ|/σ of rows before their LayerNorm, from the row statistics of their producer. It runs only while a
// model is loaded, to decide whether its LayerNorms can be folded into the GEMMs (EPILOGUES.md).

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

bool layernorm_supports(DType dtype, int hidden) {
  const int width = 16 / bytes_of(dtype);
  return hidden > 0 && hidden % width == 0 && hidden <= 32 * width * kMaxRowPacks;
}

Status layernorm(DType dtype, const void* x, const Norm& norm, int rows, int hidden, float epsilon, void* y,
                 const Stream& stream) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return with_row_packs<T>("layernorm", hidden, [&](auto packs) {
      return launch("layernorm", layernorm_kernel<T, packs>, (rows + kWarps - 1) / kWarps, kWarps * 32, 0, stream,
                    static_cast<const T*>(x), norm, rows, hidden, epsilon, static_cast<T*>(y));
    });
  });
}

Status row_offsets(const RowView& rows, int count, int width, float epsilon, float* largest, const Stream& stream) {
  return launch("row_offsets", row_offsets_kernel, (count * kLanes + kThreads - 1) / kThreads, kThreads, 0, stream,
                rows, count, width, epsilon, largest);
}

}  // namespace embert
