// What one warp does in attention: 16 query rows of one head against keys in shared memory, scores and sums in
// registers.
//
// FlashAttention-2's arithmetic on m16n8k16: scores S = Q·Kᵀ in FP32, p = 2^(c·S − c·max) with c = log2(e)/√d in the
// same multiply-add that subtracts the maximum (so scaling costs nothing and no weight is changed), P rounded to 16
// bits as the left operand of P·V, the row sum kept in FP32 and divided out once at the end.
#pragma once

#include "mma.cuh"

namespace embert {

// The scores of a warp's 16 rows and 8·kTiles keys as the products' sums begin: what the relative positions say. So the
// addition costs nothing, and the maximum knows of it. `from` is the place of the lane's first row and column; `at`
// gives element i of tile n, in mma.cuh's order.
//
// A score depends on key - query alone: what rows g + 8 want of a tile, rows g had of the one before. So a step of 64
// keys takes 18 loads and 14 moves a lane, beside its 32 scores' exps, maxima, sums and multiply-adds. The lanes of a
// load read 14 floats side by side: the L1 cache's one wavefront. Loads of two or four floats were slower
// (docs/cuda-notes.md).
//
// Plain loads: those through __ldg the compiler moves behind the next barrier, just before their use (512 texts of 8 to
// 24 tokens 22.1 → 24.1 µs a layer).
template <int kTiles, typename At>
__device__ __forceinline__ void start_scores(const float* from, const At& at) {
  float before[2] = {from[-8], from[-7]};
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      at(n, i + 2) = before[i];
      at(n, i) = before[i] = from[n * 8 + i];
    }
}
// The lane's `from`, for rows that begin with `query` and key 0.
__device__ __forceinline__ const float* first_score(const RelativeScores& relative, int head, int query, int lane) {
  return relative.scores + (2 * head + 1) * relative.reach - query + 2 * (lane % 4) - lane / 4;
}

// A step of the online softmax for the lane's row lane / 4 + 8·half: its scores become exponentials, its maximum and sum
// those of all steps so far. Returns what sums of earlier steps are to be multiplied with: 0 at the first.
template <int kTiles>
__device__ __forceinline__ float soften(float (&s)[kTiles][4], int half, float& maximum, float& sum, float scale_log2) {
  float highest = maximum;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) highest = fmaxf(highest, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
  highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
  highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
  const float correction = exp2_approximate((maximum - highest) * scale_log2);
  maximum = highest;
  const float shift = highest * scale_log2;
  float row_sum = 0.0f;
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      s[n][i] = exp2_approximate(fmaf(s[n][i], scale_log2, -shift));
      row_sum += s[n][i];
    }
  sum = fmaf(sum, correction, row_sum);
  return correction;
}
template <int kTiles>
__device__ __forceinline__ void rescale(float (&out)[kTiles][4], int half, float correction) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    out[n][2 * half] *= correction;
    out[n][2 * half + 1] *= correction;
  }
}

// kDim: the head size rounded up to a multiple of 16 with zeros in shared memory; kKeys: keys of one step.
template <typename T, int kDim, int kKeys>
struct AttentionWarp {
  static_assert(kDim % 16 == 0, "Q·Kᵀ walks the head 16 elements at a time");
  static_assert(kKeys % 16 == 0, "P·V walks the keys 16 at a time");
  static constexpr int kPitch =
      kDim + 8;  // elements; 16 bytes over, so that 8 rows of ldmatrix meet 8 different banks groups
  static constexpr int kSteps = kDim / 16;

  uint32_t q[kSteps][4];
  float out[kDim / 8][4];
  float maximum[2], sum[2];  // of rows g and g + 8

  __device__ void start(const T* q_rows, int lane) {
    // A operand: matrices (rows 0-7, k 0-7), (rows 8-15, k 0-7), (rows 0-7, k 8-15), (rows 8-15, k 8-15).
    const uint32_t address = shared_address(q_rows + (lane % 16) * kPitch + (lane / 16) * 8);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) load_matrices(q[s], address + s * 16 * sizeof(T));
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;
    maximum[0] = maximum[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }

  // One step: keys and values of rows 0 … kKeys-1 in shared memory, the first `valid` (≥ 1) of them real. `s`: of
  // start_scores, or nothing yet.
  template <bool kStarted>
  __device__ void step(const T* keys, const T* values, int valid, float scale_log2, float (&s)[kKeys / 8][4],
                       int lane) {
    if constexpr (!kStarted) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
    }

    // B operand of Q·Kᵀ, two tiles of 8 keys: (keys 0-7, d 0-7), (keys 0-7, d 8-15), (keys 8-15, d 0-7), (keys 8-15, d
    // 8-15).
    const uint32_t key_address = shared_address(keys + (lane % 8 + (lane / 16) * 8) * kPitch + ((lane / 8) % 2) * 8);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        load_matrices(b, key_address + (n * 16 * kPitch + k * 16) * sizeof(T));
        multiply_add<T>(s[2 * n], q[k], b[0], b[1]);
        multiply_add<T>(s[2 * n + 1], q[k], b[2], b[3]);
      }
    }

    if (valid < kKeys) {
      const int column = 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (n * 8 + column + (i % 2) >= valid) s[n][i] = -INFINITY;
        }
    }

#pragma unroll
    for (int half = 0; half < 2; ++half)
      rescale(out, half, soften(s, half, maximum[half], sum[half], scale_log2));

    // B operand of P·V, transposed on the way: (keys 0-7, d 0-7), (keys 8-15, d 0-7), (keys 0-7, d 8-15), (keys 8-15, d
    // 8-15).
    const uint32_t value_address = shared_address(values + (lane % 16) * kPitch + (lane / 16) * 8);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const uint32_t p[4] = {pack_two<T>(s[2 * k][0], s[2 * k][1]), pack_two<T>(s[2 * k][2], s[2 * k][3]),
                             pack_two<T>(s[2 * k + 1][0], s[2 * k + 1][1]),
                             pack_two<T>(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t b[4];
        load_matrices_transposed(b, value_address + (k * 16 * kPitch + n * 16) * sizeof(T));
        multiply_add<T>(out[2 * n], p, b[0], b[1]);
        multiply_add<T>(out[2 * n + 1], p, b[2], b[3]);
      }
    }
  }

  // Divides by the sums and writes `rows` (≤ 16) rows of `dim` elements, four lanes 16 bytes of each: by way of shared
  // memory, 16 bytes a lane, it takes a quarter of a microsecond longer.
  __device__ void finish(T* context, size_t pitch, int rows, int dim, int lane) {
    const int g = lane / 4, t = 2 * (lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[half];  // each lane summed its own columns
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const float inverse = __fdividef(1.0f, total);
      if (g + 8 * half >= rows) continue;
      T* const to = context + (g + 8 * half) * pitch + t;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        if (n * 8 < dim)
          *reinterpret_cast<uint32_t*>(to + n * 8) =
              pack_two<T>(out[n][2 * half] * inverse, out[n][2 * half + 1] * inverse);
      }
    }
  }
};

// Copies `kRows` rows of one head (`dim` elements each) to shared memory; rows from `valid` on and elements from `dim`
// on are 0.
template <typename T, int kDim, int kRows, int kThreads>
__device__ __forceinline__ void copy_head_rows(T* to, const T* from, size_t pitch, int valid, int dim, int thread) {
  constexpr int kPacks = kDim / 8;
  constexpr int kPitch = kDim + 8;
  static_assert(kRows * kPacks % kThreads == 0, "every thread copies the same number of packs");
  if constexpr (kThreads % kPacks == 0) {  // a thread keeps its column, and its rows are evenly spaced
    constexpr int kRowsAtOnce = kThreads / kPacks;
    const int row = thread / kPacks, pack = thread % kPacks;
    const bool real = pack * 8 < dim;
    const T* source = from + (real ? row * pitch + pack * 8 : 0);
    const uint32_t target = shared_address(to + row * kPitch + pack * 8);
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
      const bool copies = real && row + i * kRowsAtOnce < valid;
      copy_async(target + i * kRowsAtOnce * kPitch * sizeof(T), copies ? source : from, copies);
      source += kRowsAtOnce * pitch;
    }
  } else {
#pragma unroll
    for (int i = thread; i < kRows * kPacks; i += kThreads) {
      const int row = i / kPacks, pack = i % kPacks;
      const bool copies = row < valid && pack * 8 < dim;
      copy_async(shared_address(to + row * kPitch + pack * 8), from + (copies ? row * pitch + pack * 8 : 0), copies);
    }
  }
}

}  // namespace embert
