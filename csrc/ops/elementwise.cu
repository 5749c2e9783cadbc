// The elementwise kernels, for GEMM providers whose epilogues do not fuse them, and conversions.

#include <algorithm>

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "ops/activation.cuh"
#include "ops/elementwise.h"

namespace embert {
namespace {

// x = activation(x), in place: for GEMM providers whose epilogue cannot do it.
//
// Floor for 26 692 rows of 3 072, FP16: 164 MB read and as many written, 109 µs at 3 TB/s. That is why our own GEMMs
// fuse it.

constexpr int kThreads = 256;

template <typename T, Activation kActivation>
__global__ void __launch_bounds__(kThreads) activate_kernel(size_t packs, T* x) {
  constexpr int kWidth = Pack<T>::kSize;
  constexpr bool kExact = sizeof(T) == 4;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  for (size_t p = blockIdx.x * size_t(kThreads) + threadIdx.x; p < packs; p += size_t(gridDim.x) * kThreads) {
    Pack<T> pack = load_pack_coherent(x + p * kWidth);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float scaled = activation_factor(kActivation) * to_float(pack.values[i]);
      pack.values[i] = from_float<T>(activate<kActivation, kExact>(scaled));
    }
    store_pack(x + p * kWidth, pack);
  }
}

// At most 32 waves.
int blocks_for(size_t threads) {
  return int(std::min<size_t>((threads + kThreads - 1) / kThreads, 132 * 32));
}

// y = activation(gate)·value, where gate and value are adjacent in a GEMM's rows: for GEMM providers whose epilogue
// cannot do it.
//
// Floor for 26 692 rows of 2 · 1 152, FP16: 123 MB read and 61 written, 61 µs at 3 TB/s.

template <typename T, Activation kActivation>
__global__ void __launch_bounds__(kThreads) gate_kernel(size_t packs, const T* x, T* y) {
  constexpr int kWidth = Pack<T>::kSize;
  constexpr bool kExact = sizeof(T) == 4;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  for (size_t p = blockIdx.x * size_t(kThreads) + threadIdx.x; p < packs; p += size_t(gridDim.x) * kThreads) {
    const Pack<T> pairs[2] = {load_pack_coherent(x + 2 * p * kWidth), load_pack_coherent(x + (2 * p + 1) * kWidth)};
    Pack<T> out;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const Pack<T>& from = pairs[2 * i / kWidth];
      const float gate = to_float(from.values[2 * i % kWidth]), value = to_float(from.values[2 * i % kWidth + 1]);
      out.values[i] = from_float<T>(activate<kActivation, kExact>(activation_factor(kActivation) * gate) * value);
    }
    store_pack(y + p * kWidth, out);
  }
}

// Applies RoPE to queries and keys by their positions, in place: for GEMM providers whose epilogue cannot do it.
//
// A thread has 16 bytes of a row: pairs of one head. Floor for 26 692 rows of 2 · 768, FP16: 82 MB read and as many
// written, 55 µs at 3 TB/s; the angles of adjacent rows come from the caches.

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

// y = x between storage types: for weights at load, and for token vectors in results.

template <typename From, typename To>
__global__ void __launch_bounds__(kThreads) convert_kernel(const From* x, To* y, size_t count) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  for (size_t i = blockIdx.x * size_t(kThreads) + threadIdx.x; i < count; i += size_t(gridDim.x) * kThreads) {
    y[i] = from_float<To>(to_float(x[i]));
  }
}

}  // namespace

Status activate_rows(DType dtype, Activation activation, int rows, int columns, void* x, const Stream& stream) {
  if (columns % (16 / bytes_of(dtype)) != 0) return Status::refused("activate: columns must fill 16-byte packs");
  if (activation == Activation::kNone) return {};
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const size_t packs = size_t(rows) * columns / Pack<T>::kSize;
    return with_constant<Activation::kGeluErf, Activation::kGeluTanh, Activation::kRelu, Activation::kSilu>(
        activation, [&](auto constant) {
          return launch("activate", activate_kernel<T, decltype(constant)::value>, blocks_for(packs), kThreads, 0,
                        stream, packs, static_cast<T*>(x));
        });
  });
}

Status gate_rows(DType dtype, Activation activation, const void* x, int rows, int columns, void* y,
                 const Stream& stream) {
  if (columns % (16 / bytes_of(dtype)) != 0) return Status::refused("gate: columns must fill 16-byte packs");
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const size_t packs = size_t(rows) * columns / Pack<T>::kSize;
    return with_constant<Activation::kGeluErf, Activation::kGeluTanh, Activation::kRelu, Activation::kSilu,
                         Activation::kNone>(activation, [&](auto constant) {
      return launch("gate", gate_kernel<T, decltype(constant)::value>, blocks_for(packs), kThreads, 0, stream, packs,
                    static_cast<const T*>(x), static_cast<T*>(y));
    });
  });
}

Status rope_rows(DType dtype, void* x, int rows, int pitch, const RopeColumns& rope, const Stream& stream) {
  const int pack = 16 / bytes_of(dtype);
  if (rope.head_size % pack != 0 || rope.columns % rope.head_size != 0 || pitch % pack != 0 || rope.columns > pitch ||
      rope.rotary_dim % 2 != 0 || rope.rotary_dim > rope.head_size)
    return Status::refused("rope: ", rope.rotary_dim, " columns of heads of ", rope.head_size, " in rows of ", pitch);
  const size_t packs = size_t(rows) * (rope.columns / pack);
  if (packs > size_t(INT32_MAX) / 2) return Status::refused("rope: ", rows, " rows are too many");
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return launch("rope", rope_kernel<T>, blocks_for(packs), kThreads, 0, stream, static_cast<T*>(x), int(packs), pitch,
                  rope);
  });
}

Status convert(DType from, const void* x, DType to, void* y, size_t count, const Stream& stream) {
  return with_dtype(from, [&](auto from_type) {
    return with_dtype(to, [&](auto to_type) {
      using From = decltype(from_type);
      using To = decltype(to_type);
      return launch("convert", convert_kernel<From, To>, blocks_for(count), kThreads, 0, stream,
                    static_cast<const From*>(x), static_cast<To*>(y), count);
    });
  });
}

}  // namespace embert
