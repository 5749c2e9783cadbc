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

template <typename T>
Status launch_activate(Activation activation, int rows, int columns, void* x, const Stream& stream) {
  const size_t packs = size_t(rows) * columns / Pack<T>::kSize;
  const int blocks = int(std::min<size_t>((packs + kThreads - 1) / kThreads, 132 * 32));  // 32 waves
  const auto run = [&](auto kernel) {
    return launch("activate", kernel, blocks, kThreads, 0, stream, packs, static_cast<T*>(x));
  };
  switch (activation) {
    case Activation::kGeluErf:
      return run(activate_kernel<T, Activation::kGeluErf>);
    case Activation::kGeluTanh:
      return run(activate_kernel<T, Activation::kGeluTanh>);
    case Activation::kRelu:
      return run(activate_kernel<T, Activation::kRelu>);
    case Activation::kSilu:
      return run(activate_kernel<T, Activation::kSilu>);
    default:
      return {};
  }
}

}  // namespace

Status activate_rows(DType dtype, Activation activation, int rows, int columns, void* x, const Stream& stream) {
  if (columns % (16 / bytes_of(dtype)) != 0) return Status::refused("activate: columns must fill 16-byte packs");
  switch (dtype) {
    case DType::kFloat16:
      return launch_activate<half_t>(activation, rows, columns, x, stream);
    case DType::kBFloat16:
      return launch_activate<bfloat_t>(activation, rows, columns, x, stream);
    default:
      return launch_activate<float>(activation, rows, columns, x, stream);
  }
}

namespace {

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

template <typename T>
Status launch_gate(Activation activation, const void* x, size_t elements, void* y, const Stream& stream) {
  const size_t packs = elements / Pack<T>::kSize;
  const int blocks = int(std::min<size_t>((packs + kThreads - 1) / kThreads, 132 * 32));  // 32 waves
  const auto run = [&](auto kernel) {
    return launch("gate", kernel, blocks, kThreads, 0, stream, packs, static_cast<const T*>(x), static_cast<T*>(y));
  };
  switch (activation) {
    case Activation::kGeluErf:
      return run(gate_kernel<T, Activation::kGeluErf>);
    case Activation::kGeluTanh:
      return run(gate_kernel<T, Activation::kGeluTanh>);
    case Activation::kRelu:
      return run(gate_kernel<T, Activation::kRelu>);
    case Activation::kSilu:
      return run(gate_kernel<T, Activation::kSilu>);
    default:
      return run(gate_kernel<T, Activation::kNone>);
  }
}

}  // namespace

Status gate_rows(DType dtype, Activation activation, const void* x, int rows, int columns, void* y,
                 const Stream& stream) {
  if (columns % (16 / bytes_of(dtype)) != 0) return Status::refused("gate: columns must fill 16-byte packs");
  const size_t elements = size_t(rows) * columns;
  switch (dtype) {
    case DType::kFloat16:
      return launch_gate<half_t>(activation, x, elements, y, stream);
    case DType::kBFloat16:
      return launch_gate<bfloat_t>(activation, x, elements, y, stream);
    default:
      return launch_gate<float>(activation, x, elements, y, stream);
  }
}

namespace {

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

namespace {

// y = x between storage types: for weights at load, and for token vectors in answers.

template <typename From, typename To>
__global__ void __launch_bounds__(kThreads) convert_kernel(const From* x, To* y, size_t count) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  for (size_t i = blockIdx.x * size_t(kThreads) + threadIdx.x; i < count; i += size_t(gridDim.x) * kThreads) {
    y[i] = from_float<To>(to_float(x[i]));
  }
}

template <typename From>
Status convert_from(const void* x, DType to, void* y, size_t count, const Stream& stream) {
  const int blocks = int(std::min<size_t>((count + kThreads - 1) / kThreads, 132 * 32));
  const From* source = static_cast<const From*>(x);
  switch (to) {
    case DType::kFloat16:
      return launch("convert", convert_kernel<From, half_t>, blocks, kThreads, 0, stream, source,
                    static_cast<half_t*>(y), count);
    case DType::kBFloat16:
      return launch("convert", convert_kernel<From, bfloat_t>, blocks, kThreads, 0, stream, source,
                    static_cast<bfloat_t*>(y), count);
    default:
      return launch("convert", convert_kernel<From, float>, blocks, kThreads, 0, stream, source, static_cast<float*>(y),
                    count);
  }
}

}  // namespace

Status convert(DType from, const void* x, DType to, void* y, size_t count, const Stream& stream) {
  switch (from) {
    case DType::kFloat16:
      return convert_from<half_t>(x, to, y, count, stream);
    case DType::kBFloat16:
      return convert_from<bfloat_t>(x, to, y, count, stream);
    default:
      return convert_from<float>(x, to, y, count, stream);
  }
}

}  // namespace embert
