// A warp's part of attention: 16 query rows of one head against keys in shared memory, with scores and sums in
// registers.
//
// The arithmetic is FlashAttention-2's on m16n8k16. Scores S = Q·Kᵀ are in FP32. p = 2^(c·S − c·max) with c =
// log2(e)/√d: one multiply-add scales and subtracts the maximum, so scaling is free and no weight changes. P is rounded
// to 16 bits as the left operand of P·V. The row's sum stays in FP32 and is divided out at the end.
#pragma once

#include "attention/scores.cuh"
#include "attention/window.h"
#include "common/mma.cuh"
#include "common/numeric.cuh"
#include "common/shared_memory.cuh"
#include "ops/blocks.cuh"
#include "ops/quantize.h"

namespace embert {

// The columns of qkv where every head of queries has its key and value head: [3, heads, dim].
struct OwnKeys {
  int heads, dim;

  __device__ __forceinline__ size_t pitch() const { return size_t(3) * heads * dim; }
  // From a head's query to its key, and to its value.
  __device__ __forceinline__ int keys(int /* head */) const { return heads * dim; }
  __device__ __forceinline__ int values(int /* head */) const { return 2 * heads * dim; }
  __device__ __forceinline__ int keys_to_values() const { return heads * dim; }
};

// The same where `group` adjacent heads share one: [heads of queries | heads of keys | heads of values, dim].
struct SharedKeys {
  int heads, kv_heads, group, dim;

  __device__ __forceinline__ size_t pitch() const { return size_t(heads + 2 * kv_heads) * dim; }
  __device__ __forceinline__ int keys(int head) const { return (heads + head / group - head) * dim; }
  __device__ __forceinline__ int values(int head) const { return keys(head) + keys_to_values(); }
  __device__ __forceinline__ int keys_to_values() const { return kv_heads * dim; }
};

// Sums over a row's four lanes.
__device__ __forceinline__ float row_total(float total) {
  total += __shfl_xor_sync(~0u, total, 1);
  return total + __shfl_xor_sync(~0u, total, 2);
}

// A head's rows in int8, from accumulators of m16n8: out[4j + i], or out[j][i]. Each is divided by its row's sum and
// rounded to FP16 first, as for an FP16 context.
template <int kDim>
struct HeadBlocks {
  uint32_t bytes[2][kDim / 16], maxima;

  template <typename Element>
  __device__ __forceinline__ HeadBlocks(const Element& element, const float (&sum)[2]) {
    uint32_t y[2][kDim / 8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = __fdividef(1.0f, row_total(sum[half]));
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
        y[half][n] = pack_two<half_t>(element(n, 2 * half) * inverse, element(n, 2 * half + 1) * inverse);
    }
    rotate_block(y);
    maxima = block_maxima(y);
    round_block(y, maxima, bytes);
  }

  // Rows past `rows` are not stored.
  __device__ __forceinline__ void store_maxima(const QuantizedBlocks& to, int first_row, int rows, int head, int heads,
                                               int lane) const {
    const int row = lane / 4 + lane % 4 * 8;
    if (lane % 4 >= 2 || row >= rows) return;
    static_cast<half_t*>(to.maxima)[size_t(first_row + row) * heads + head] =
        lane % 4 == 0 ? __low2half(as_half2(maxima)) : __high2half(as_half2(maxima));
  }
};

// A score that a window masks. If a step's keys are all masked for a row, the exponentials are 1, not NaN as with
// infinities. The first step with a visible key then cancels them: 2^(c·(kMaskedScore − max)) is 0. It is a power of
// two, because c·kMaskedScore has to be exact.
constexpr float kMaskedScore = -1.2676506002282294e30f;  // −2^100

// Masks keys outside of a window around each query. `query`, `key`: of the lane's first row and column, counted from
// the text's start.
template <int kTiles>
__device__ __forceinline__ void mask_keys(float (&s)[kTiles][4], int query, int key, const KeyWindow& window) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (window.hides(query + i / 2 * 8, key + n * 8 + i % 2)) s[n][i] = kMaskedScore;
    }
}

// Sums of the weights of the lane's rows, the first of which is `query`: infinite where a row attends to no key, so
// that its context is 0.
__device__ __forceinline__ void clear_unseeing(float (&sum)[2], int query, int length, const KeyWindow& window) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!window.sees_any(query + 8 * half, length)) sum[half] = INFINITY;
  }
}

// Scores that no window masks.
struct NoMask {
  template <typename Scores>
  __device__ void operator()(Scores&) const {}
};

// kDim: the head size, rounded up to a multiple of 16 with zeros in shared memory. kKeys: the keys of a step.
template <typename T, int kDim, int kKeys>
struct AttentionWarp {
  static_assert(kDim % 16 == 0, "Q·Kᵀ walks the head 16 elements at a time");
  static_assert(kKeys % 16 == 0, "P·V walks the keys 16 at a time");
  static constexpr int kPitch =
      kDim + 8;  // elements; the 16 extra bytes put the 8 rows of an ldmatrix into different banks
  static constexpr int kSteps = kDim / 16;

  uint32_t q[kSteps][4];
  float out[kDim / 8][4];
  float maximum[2], sum[2];  // of rows g and g + 8

  __device__ void start(const T* q_rows, int lane) {
    // A operand: matrices (rows 0-7, k 0-7), (rows 8-15, k 0-7), (rows 0-7, k 8-15), (rows 8-15, k 8-15).
    const uint32_t address = shared_address(q_rows + (lane % 16) * kPitch + (lane / 16) * 8);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) ldmatrix_x4(q[s], address + s * 16 * sizeof(T));
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;
    maximum[0] = maximum[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }

  // One step: rows 0 … kKeys-1 of keys and values in shared memory, of which the first `valid` (≥ 1) are real.
  // kStarted: `s` comes from init_scores; otherwise it is uninitialized. `hides`: called with the scores.
  template <bool kStarted, typename WindowMask = NoMask>
  __device__ void step(const T* keys, const T* values, int valid, float scale_log2, float (&s)[kKeys / 8][4], int lane,
                       const WindowMask& hides = {}) {
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
        ldmatrix_x4(b, key_address + (n * 16 * kPitch + k * 16) * sizeof(T));
        mma_m16n8k16<T>(s[2 * n], q[k], b[0], b[1]);
        mma_m16n8k16<T>(s[2 * n + 1], q[k], b[2], b[3]);
      }
    }

    hides(s);
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
      rescale(out, half, online_softmax(s, half, maximum[half], sum[half], scale_log2));

    // B operand of P·V, transposed by the load: (keys 0-7, d 0-7), (keys 8-15, d 0-7), (keys 0-7, d 8-15), (keys 8-15,
    // d 8-15).
    const uint32_t value_address = shared_address(values + (lane % 16) * kPitch + (lane / 16) * 8);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const uint32_t p[4] = {pack_two<T>(s[2 * k][0], s[2 * k][1]), pack_two<T>(s[2 * k][2], s[2 * k][3]),
                             pack_two<T>(s[2 * k + 1][0], s[2 * k + 1][1]),
                             pack_two<T>(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < kDim / 16; ++n) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, value_address + (k * 16 * kPitch + n * 16) * sizeof(T));
        mma_m16n8k16<T>(out[2 * n], p, b[0], b[1]);
        mma_m16n8k16<T>(out[2 * n + 1], p, b[2], b[3]);
      }
    }
  }

  // The same rows in int8, with the head as a block of kDim columns.
  __device__ void finish(const QuantizedBlocks& context, int first_row, int rows, int head, int heads, int lane) {
    const HeadBlocks<kDim> blocks([&](int n, int i) { return out[n][i]; }, sum);
    blocks.store_maxima(context, first_row, rows, head, heads, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (lane / 4 + 8 * half >= rows) continue;
      int8_t* const to = context.data + (size_t(first_row + lane / 4 + 8 * half) * heads + head) * kDim + lane % 4 * 4;
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) *reinterpret_cast<uint32_t*>(to + 16 * i) = blocks.bytes[half][i];
    }
  }

  // Divides by the sums and writes `rows` (≤ 16) rows of `dim` elements, four lanes 16 bytes of each. Stores of 16
  // bytes a lane would go through shared memory, which takes a quarter of a microsecond longer.
  __device__ void finish(T* context, size_t pitch, int rows, int dim, int lane) {
    const int g = lane / 4, t = 2 * (lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = __fdividef(1.0f, row_total(sum[half]));
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
      cp_async(target + i * kRowsAtOnce * kPitch * sizeof(T), copies ? source : from, copies);
      source += kRowsAtOnce * pitch;
    }
  } else {
#pragma unroll
    for (int i = thread; i < kRows * kPacks; i += kThreads) {
      const int row = i / kPacks, pack = i % kPacks;
      const bool copies = row < valid && pack * 8 < dim;
      cp_async(shared_address(to + row * kPitch + pack * 8), from + (copies ? row * pitch + pack * 8 : 0), copies);
    }
  }
}

}  // namespace embert
