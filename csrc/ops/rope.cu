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
__global__ void __launch_bounds__(kThreads) rope_kernel(T* x, int packs, int pitch, const RopeColumns rope) {
  constexpr int kWidth = Pack<T>::kSize;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int packs_of_row = rope.columns / kWidth;
  for (int p = blockIdx.x * kThreads + threadIdx.x; p < packs; p += gridDim.x * kThreads) {
    const int row = p / packs_of_row, column = p % packs_of_row * kWidth, in_head = column % rope.head_size;
    if (in_head >= rope.rotary_dim) continue;
    const int half = rope.rotary_dim / 2;
    // Written by this batch's first kernel: not through the read-only path.
    const float2* const angles = rope.table + size_t(*(rope.positions + row)) * half;
    T* const place = x + size_t(row) * pitch + column;
    Pack<T> pack = load_pack_coherent(place);
#pragma unroll
    for (int i = 0; i < kWidth; i += 2) {
      const int j = (in_head + i) / 2;
      if (j >= half) continue;
      const float2 cos_sin = __ldg(angles + j);
      const float a = to_float(pack.values[i]), b = to_float(pack.values[i + 1]);
      pack.values[i] = from_float<T>(a * cos_sin.x - b * cos_sin.y);
      pack.values[i + 1] = from_float<T>(b * cos_sin.x + a * cos_sin.y);
    }
    store_pack(place, pack);
  }
}

template <typename T>
Status launch_rope(void* x, int rows, int pitch, const RopeColumns& rope, const Stream& stream) {
  const size_t packs = size_t(rows) * (rope.columns / Pack<T>::kSize);
  if (packs > size_t(INT32_MAX) / 2) return Status::refused("rope: " + std::to_string(rows) + " rows are too many");
  const int blocks = int(std::min<size_t>((packs + kThreads - 1) / kThreads, 132 * 32));  // 32 waves
  return launch("rope", rope_kernel<T>, blocks, kThreads, 0, stream, static_cast<T*>(x), int(packs), pitch, rope);
}

}  // namespace

Status rope_rows(DType dtype, void* x, int rows, int pitch, const RopeColumns& rope, const Stream& stream) {
  const int pack = 16 / bytes_of(dtype);
  if (rope.head_size % pack != 0 || rope.columns % rope.head_size != 0 || pitch % pack != 0 || rope.columns > pitch ||
      rope.rotary_dim % 2 != 0 || rope.rotary_dim > rope.head_size)
    return Status::refused("rope: " + std::to_string(rope.rotary_dim) + " columns of heads of " +
                           std::to_string(rope.head_size) + " in rows of " + std::to_string(pitch));
  switch (dtype) {
    case DType::kFloat16:
      return launch_rope<half_t>(x, rows, pitch, rope, stream);
    case DType::kBFloat16:
      return launch_rope<bfloat_t>(x, rows, pitch, rope, stream);
    default:
      return launch_rope<float>(x, rows, pitch, rope, stream);
  }
}

}  // namespace embert
