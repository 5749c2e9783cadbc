// Applies RoPE to queries and keys by their positions, in place: for GEMM providers whose epilogue cannot do it.
//
// A thread has 16 bytes of a row: pairs of one head. Floor for 26 692 rows of 2 · 768, FP16: 82 MB read and as many
// written, 55 µs at 3 TB/s; the angles of adjacent rows come from the caches.

#include <algorithm>

#include "common/dependent_launch.cuh"
#include "common/numeric.cuh"
#include "ops/elementwise.h"

namespace embert {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) rope_kernel(T* x, int packs, int pitch, const RopeColumns of) {
  constexpr int kWidth = Pack<T>::kSize;
  dependents_may_launch();
  wait_for_earlier_kernels();
  const int packs_of_row = of.columns / kWidth;
  for (int p = blockIdx.x * kThreads + threadIdx.x; p < packs; p += gridDim.x * kThreads) {
    const int row = p / packs_of_row, column = p % packs_of_row * kWidth, in_head = column % of.head_size;
    if (in_head >= of.rotary_dim) continue;
    const int half = of.rotary_dim / 2;
    // Written by this batch's first kernel: not through the read-only path.
    const float2* const angles = of.table + size_t(*(of.positions + row)) * half;
    T* const place = x + size_t(row) * pitch + column;
    Pack<T> pack = load_fresh(place);
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      const int j = (in_head + i) / 2;
      if (j >= half) continue;
      const float2 by = __ldg(angles + j);
      const float a = to_float(pack.values[i]), b = to_float(pack.values[i + 1]);
      pack.values[i] = from_float<T>(a * by.x - b * by.y);
      pack.values[i + 1] = from_float<T>(b * by.x + a * by.y);
    }
    store_pack(place, pack);
  }
}

template <typename T>
Status launch_turn(void* x, int rows, int pitch, const RopeColumns& of, const Stream& stream) {
  const size_t packs = size_t(rows) * (of.columns / Pack<T>::kSize);
  if (packs > size_t(INT32_MAX) / 2) return Status::refused("rope: " + std::to_string(rows) + " rows are too many");
  const int blocks = int(std::min<size_t>((packs + kThreads - 1) / kThreads, 132 * 32));  // 32 waves
  return launch("rope", rope_kernel<T>, blocks, kThreads, 0, stream, static_cast<T*>(x), int(packs), pitch, of);
}

}  // namespace

Status rope_rows(DType dtype, void* x, int rows, int pitch, const RopeColumns& of, const Stream& stream) {
  const int pack = 16 / bytes_of(dtype);
  if (of.head_size % pack != 0 || of.columns % of.head_size != 0 || pitch % pack != 0 || of.columns > pitch ||
      of.rotary_dim % 2 != 0 || of.rotary_dim > of.head_size)
    return Status::refused("rope: " + std::to_string(of.rotary_dim) + " columns of heads of " +
                           std::to_string(of.head_size) + " in rows of " + std::to_string(pitch));
  switch (dtype) {
    case DType::kFloat16:
      return launch_turn<half_t>(x, rows, pitch, of, stream);
    case DType::kBFloat16:
      return launch_turn<bfloat_t>(x, rows, pitch, of, stream);
    default:
      return launch_turn<float>(x, rows, pitch, of, stream);
  }
}

}  // namespace embert
