// y = c · (Σ taps · (b · x) + bias): the gated short convolution, everything between load and store in FP32.
//
// A block has kRows rows of kColumns columns. Their products b · x, and those of the rows that their taps reach, are
// computed once, in shared memory. Floor for 26 361 rows of 1 024, FP16: b, c and x read and y written, 216 MB, 72 µs
// at 3 TB/s; with 3 taps 2 rows in 32 are read twice.

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "ops/convolution.h"

namespace embert {
namespace {

constexpr int kThreads = 256, kRows = 32, kColumns = 64;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    convolve_kernel(const T* x, const int* positions, const Convolution convolution, int rows, int hidden, T* y) {
  constexpr int kWidth = Pack<T>::kSize, kPacks = kColumns / kWidth, kStep = kThreads / kPacks, kGates = kRows / kStep;
  extern __shared__ __align__(16) float products[];  // [kRows + taps − 1][kColumns]
  __shared__ int place[kRows + kMaxTaps - 1];        // row − position: equal for rows of one text only
  const int taps = convolution.taps, before = taps - 1 - convolution.after;
  const int first = blockIdx.x * kRows, read = kRows + taps - 1;
  const int in_tile = threadIdx.x % kPacks * kWidth, column = blockIdx.y * kColumns + in_tile;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  // All loads of a thread are in flight at once, with up to 33 taps.
  static_assert(kRows + kMaxTaps - 1 <= kThreads, "a thread each");
  const int placed = first - before + int(threadIdx.x);
  const bool has_place = int(threadIdx.x) < read && placed >= 0 && placed < rows;
  const int position = has_place ? *(positions + placed) : 0;
  Pack<T> gates[kGates], b[2], value[2];
#pragma unroll
  for (int g = 0; g < kGates; ++g) {
    const int row = first + threadIdx.x / kPacks + g * kStep;
    if (row < rows && column < hidden) gates[g] = load_pack_coherent(x + (size_t(row) * 3 + 1) * hidden + column);
  }
  for (int from = threadIdx.x / kPacks; from < read; from += 2 * kStep) {
    const auto place_of = [&](int half) {
      const int i = from + half * kStep, row = first - before + i;
      return i < read && row >= 0 && row < rows && column < hidden ? row : -1;
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (place_of(half) < 0) continue;
      const T* const start = x + size_t(place_of(half)) * 3 * hidden + column;
      b[half] = load_pack_coherent(start), value[half] = load_pack_coherent(start + 2 * hidden);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (place_of(half) < 0) continue;
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        products[(from + half * kStep) * kColumns + in_tile + k] =
            to_float(b[half].values[k]) * to_float(value[half].values[k]);
    }
  }
  if (int(threadIdx.x) < read) place[threadIdx.x] = has_place ? placed - position : -1;
  __syncthreads();
#pragma unroll
  for (int g = 0; g < kGates; ++g) {
    const int i = threadIdx.x / kPacks + g * kStep, row = first + i;
    if (row >= rows || column >= hidden) return;
    float sums[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sums[k] = __ldg(convolution.weights.bias + column + k);
    for (int tap = 0; tap < taps; ++tap) {
      if (place[i + tap] != place[i + before]) continue;
#pragma unroll
      for (int k = 0; k < kWidth; k += 4) {
        const Pack<float> four = load_pack(convolution.weights.weight + size_t(tap) * hidden + column + k);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          sums[k + j] = fmaf(four.values[j], products[(i + tap) * kColumns + in_tile + k + j], sums[k + j]);
      }
    }
    Pack<T> out;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) out.values[k] = from_float<T>(to_float(gates[g].values[k]) * sums[k]);
    store_pack(y + size_t(row) * hidden + column, out);
  }
}

// A block writes kThreads packs of a tile's hidden rows.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    clear_hidden_rows_kernel(const AttentionTile* tiles, const float* bias, int columns, T* x) {
  const AttentionTile tile = early_tile(tiles + blockIdx.x);
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int column = (blockIdx.y * kThreads + threadIdx.x) * Pack<T>::kSize;
  if (column >= columns) return;
  Pack<T> values;
#pragma unroll
  for (int k = 0; k < Pack<T>::kSize; ++k) values.values[k] = from_float<T>(__ldg(bias + column + k));
  const int end = min(tile.query + kAttentionRows, tile.tokens());
  for (int row = max(tile.query, tile.length); row < end; ++row)
    store_pack(x + size_t(tile.first_row + row) * columns + column, values);
}

}  // namespace

Status convolve_rows(DType dtype, const void* x, const int* positions, const Convolution& convolution, int rows,
                     int hidden, void* y, const Stream& stream) {
  const int taps = convolution.taps, after = convolution.after;
  if (taps < 1 || taps > kMaxTaps || after < 0 || after >= taps || hidden % (16 / bytes_of(dtype)) != 0)
    return Status::refused("convolution: ", taps, " taps, ", after, " of later rows, in rows of ", hidden);
  const dim3 grid((rows + kRows - 1) / kRows, (hidden + kColumns - 1) / kColumns);
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return launch("convolution", convolve_kernel<T>, grid, kThreads,
                  size_t(kRows + taps - 1) * kColumns * sizeof(float), stream, static_cast<const T*>(x), positions,
                  convolution, rows, hidden, static_cast<T*>(y));
  });
}

Status clear_hidden_rows(DType dtype, const AttentionTile* tiles, int count, const float* bias, int hidden, void* x,
                         const Stream& stream) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const int columns = 3 * hidden, packs = columns / Pack<T>::kSize;
    return launch("clear_hidden_rows", clear_hidden_rows_kernel<T>, dim3(count, (packs + kThreads - 1) / kThreads),
                  kThreads, 0, stream, tiles, bias, columns, static_cast<T*>(x));
  });
}

}  // namespace embert
