// A row of up to kPacks · 32 packs in one warp's FP32 registers, and its LayerNorm.
#pragma once

#include <utility>

#include "common/launch.h"
#include "common/numeric.cuh"

namespace embert {

// Lane l holds packs l, l + 32, …, so adjacent lanes hold adjacent 16 bytes.
template <typename T, int kPacks>
struct WarpRow {
  static constexpr int kWidth = Pack<T>::kSize;
  float values[kPacks][kWidth];

  __device__ static bool holds(int pack, int lane, int hidden) { return (pack * 32 + lane) * kWidth < hidden; }

  // Adds a row to this one; elements past `hidden` stay 0.
  __device__ void add(const Pack<T> (&packs)[kPacks], int lane, int hidden) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!holds(p, lane, hidden)) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[p][i] += to_float(packs[p].values[i]);
    }
  }

  // Calls f(element of this row, element of the vector in the same column) for all that the lane holds. The vector is
  // gamma or beta.
  template <typename F>
  __device__ void with_vector(const float* vector, int lane, int hidden, F&& f) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!holds(p, lane, hidden)) continue;
#pragma unroll
      for (int i = 0; i < kWidth; i += 4) {
        const Pack<float> four = load_pack(vector + (p * 32 + lane) * kWidth + i);
#pragma unroll
        for (int k = 0; k < 4; ++k) f(values[p][i + k], four.values[k]);
      }
    }
  }
  // Replaces this row by the vector.
  __device__ void load_vector(const float* vector, int lane, int hidden) {
    with_vector(vector, lane, hidden, [](float& element, float other) { element = other; });
  }
  __device__ void multiply(const float* vector, int lane, int hidden) {
    with_vector(vector, lane, hidden, [](float& element, float other) { element *= other; });
  }

  __device__ void clear() {
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[p][i] = 0.0f;
  }

  __device__ void store_into(T* y, int lane, int hidden) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!holds(p, lane, hidden)) continue;
      Pack<T> out;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) out.values[i] = from_float<T>(values[p][i]);
      store_pack(y + (p * 32 + lane) * kWidth, out);
    }
  }

  // The sum of the elements (x) and of their squares (y).
  __device__ float2 sums() const {
    float2 total = {0.0f, 0.0f};
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        total.x += values[p][i];
        total.y = fmaf(values[p][i], values[p][i], total.y);
      }
    return {warp_sum(total.x), warp_sum(total.y)};
  }

  // Two passes over registers: the mean, then the variance about it. So outlier channels cost no accuracy.
  __device__ void standardize(int lane, int hidden, float epsilon) {
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum += values[p][i];
    const float mean = warp_sum(sum) / hidden;
    float squares = 0.0f;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!holds(p, lane, hidden)) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float d = values[p][i] - mean;
        squares = fmaf(d, d, squares);
      }
    }
    const float scale = rsqrtf(warp_sum(squares) / hidden + epsilon);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!holds(p, lane, hidden)) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[p][i] = (values[p][i] - mean) * scale;
    }
  }
  __device__ void normalize_into(T* y, const WarpRow& gamma, const WarpRow& beta, int lane, int hidden, float epsilon) {
    standardize(lane, hidden, epsilon);
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
#pragma unroll
      for (int i = 0; i < kWidth; ++i) values[p][i] = fmaf(values[p][i], gamma.values[p][i], beta.values[p][i]);
    store_into(y, lane, hidden);
  }
};

template <typename T, int kPacks>
__device__ __forceinline__ void load_row(Pack<T> (&packs)[kPacks], const T* row, int lane, int hidden) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (WarpRow<T, kPacks>::holds(p, lane, hidden))
      packs[p] = load_pack_coherent(row + (p * 32 + lane) * Pack<T>::kSize);
  }
}

constexpr int kMaxRowPacks = 8;  // 2 048 elements of 16 bits, 1 024 of FP32; with more, registers spill

// Returns f(packs of a lane, as a compile-time constant): the first of these that hold a row of `hidden` elements. More
// than it needs change no bits. Instances take long to compile.
template <typename T, int... kPacks, typename F>
Status with_row_packs_of(const char* name, int hidden, std::integer_sequence<int, kPacks...>, F&& f) {
  const int needed = (hidden + 32 * Pack<T>::kSize - 1) / (32 * Pack<T>::kSize);
  if (needed < 1 || needed > kMaxRowPacks) return Status::refused(name, ": hidden size ", hidden, " is too large");
  int packs = 0;
  ((packs = packs == 0 && kPacks >= needed ? kPacks : packs), ...);
  return with_constant<kPacks...>(packs, f);
}
template <typename T, typename F>
Status with_row_packs(const char* name, int hidden, F&& f) {
  return with_row_packs_of<T>(name, hidden, std::integer_sequence<int, 2, 3, 4, 6, kMaxRowPacks>(), f);
}

}  // namespace embert
