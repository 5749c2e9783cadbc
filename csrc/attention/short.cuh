// Attention of sequences of at most 32 tokens: two warps process a (sequence, head), 16 query rows each, with all
// scores in registers. It is part of two kernels (sm80.cu, sm90.cu), and computes the same bits in both.
#pragma once

#include "attention/warp.cuh"
#include "common/barrier.cuh"
#include "common/launch.cuh"
#include "ops/attention_work.h"

namespace embert {

constexpr int kShortPairs = 2;  // pairs of warps of a block

template <typename T, int kDim>
constexpr size_t short_shared_bytes() {  // Q, K and V of each pair
  return size_t(kShortPairs) * 3 * kAttentionShort * (kDim + 8) * sizeof(T);
}

// Context: T*, or QuantizedBlocks where kDim is the head size. For the two warps of `pair`; `thread`: 0 … 63 of them;
// `smem`: short_shared_bytes of the block.
template <typename T, int kDim, bool kRelative, bool kWindow = false, typename Context, typename Columns>
__device__ __forceinline__ void attend_short(const T* qkv, const AttentionTile& tile, int head, float scale_log2,
                                             const RelativeScores& relative, const Context& context, uint8_t* smem,
                                             int pair, int thread, const Columns& columns,
                                             const KeyWindow& window = {}) {
  const int heads = columns.heads, dim = columns.dim;
  using Warp = AttentionWarp<T, kDim, kAttentionShort>;
  T* const queries = reinterpret_cast<T*>(smem) + pair * 3 * kAttentionShort * Warp::kPitch;
  T* const keys = queries + kAttentionShort * Warp::kPitch;
  T* const values = keys + kAttentionShort * Warp::kPitch;
  const size_t pitch = columns.pitch();
  const T* const q_from = qkv + size_t(tile.first_row) * pitch + head * dim;
  copy_head_rows<T, kDim, kAttentionShort, 64>(queries, q_from, pitch, tile.tokens(), dim, thread);
  copy_head_rows<T, kDim, kAttentionShort, 64>(keys, q_from + columns.keys(head), pitch, tile.length, dim, thread);
  copy_head_rows<T, kDim, kAttentionShort, 64>(values, q_from + columns.values(head), pitch, tile.length, dim, thread);
  cp_async_commit();
  const int query = thread / 32 * 16, lane = thread % 32;
  float s[kAttentionShort / 8][4];
  if constexpr (kRelative)
    init_scores<kAttentionShort / 8>(first_score(relative, head, query, lane),
                                     [&](int n, int i) -> float& { return s[n][i]; });
  cp_async_wait<0>();
  static_assert(kShortPairs == 2, "a barrier each");
  named_barrier_sync_either<kPairBarrier, 64>(pair);
  if (query >= tile.tokens()) return;
  Warp work;
  work.start(queries + query * Warp::kPitch, lane);
  if constexpr (kWindow) {
    work.template step<kRelative>(keys, values, tile.length, scale_log2, s, lane,
                                  [&](auto& scores) { mask_keys(scores, query + lane / 4, 2 * (lane % 4), window); });
    clear_unseeing(work.sum, query + lane / 4, tile.length, window);
  } else {
    work.template step<kRelative>(keys, values, tile.length, scale_log2, s, lane);
  }
  const size_t row = size_t(tile.first_row) + query;
  const int rows = min(16, tile.tokens() - query);
  if constexpr (std::is_same_v<Context, QuantizedBlocks>) {
    work.finish(context, int(row), rows, head, heads, lane);
  } else {
    work.finish(context + row * heads * dim + head * dim, size_t(heads) * dim, rows, dim, lane);
  }
}

// Runs a block of a kernel for short texts only: two heads of the text blockIdx.y.
template <typename T, int kDim, bool kRelative, bool kWindow, typename Columns>
__device__ __forceinline__ void attend_shorts(const T* qkv, const AttentionTile* shorts, float scale_log2,
                                              const RelativeScores& relative, T* context, const Columns& columns,
                                              const KeyWindow& window) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  const int pair = threadIdx.x / 64, head = blockIdx.x * kShortPairs + pair;
  const AttentionTile tile = early_tile(shorts + blockIdx.y);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // not earlier: gemm/kernels/small_m.cuh
  if (tile.length == 0 || head >= columns.heads) return;
  attend_short<T, kDim, kRelative, kWindow>(qkv, tile, head, scale_log2, relative, context, shared_bytes, pair,
                                            threadIdx.x % 64, columns, window);
}

}  // namespace embert
