// Attention of sequences of at most 32 tokens: two warps process a (sequence, head), 16 query rows each, with all
// scores in registers. It is part of two kernels (sm80.cu, sm90.cu), and computes the same bits in both.
#pragma once

#include "attention/warp.cuh"
#include "common/barrier.cuh"
#include "ops/attention_work.h"

namespace embert {

constexpr int kShortPairs = 2;  // pairs of warps of a block

template <typename T, int kDim>
constexpr size_t short_shared_bytes() {  // Q, K and V of each pair
  return size_t(kShortPairs) * 3 * kAttentionShort * (kDim + 8) * sizeof(T);
}

// A barrier of the two warps of a pair. Barrier numbers are constants here: a number in a register counts as all 16
// barriers of a block, which limits a multiprocessor to four blocks.
__device__ __forceinline__ void sync_pair(int pair) {
  static_assert(kShortPairs == 2, "a barrier each");
  if (pair == 0)
    asm volatile("bar.sync %0, 64;" ::"n"(int{kPairBarrier}) : "memory");
  else
    asm volatile("bar.sync %0, 64;" ::"n"(kPairBarrier + 1) : "memory");
}

// Context: T*, or QuantizedBlocks where kDim is dim. For the two warps of `pair`; `thread`: 0 … 63 of them; `smem`:
// short_shared_bytes of the block.
template <typename T, int kDim, bool kRelative, bool kWindow = false, typename Context, typename Columns>
__device__ __forceinline__ void attend_short(const T* qkv, const AttentionTile& tile, int head, int heads, int dim,
                                             float scale_log2, const RelativeScores& relative, const Context& context,
                                             uint8_t* smem, int pair, int thread, const Columns& columns,
                                             const KeyWindow& window = {}) {
  using Warp = AttentionWarp<T, kDim, kAttentionShort>;
  T* const queries = reinterpret_cast<T*>(smem) + pair * 3 * kAttentionShort * Warp::kPitch;
  T* const keys = queries + kAttentionShort * Warp::kPitch;
  T* const values = keys + kAttentionShort * Warp::kPitch;
  const size_t pitch = columns.pitch();
  const T* const q_from = qkv + size_t(tile.first_row) * pitch + head * dim;
  copy_head_rows<T, kDim, kAttentionShort, 64>(queries, q_from, pitch, tile.length, dim, thread);
  copy_head_rows<T, kDim, kAttentionShort, 64>(keys, q_from + columns.keys(head), pitch, tile.length, dim, thread);
  copy_head_rows<T, kDim, kAttentionShort, 64>(values, q_from + columns.values(head), pitch, tile.length, dim, thread);
  cp_async_commit();
  const int query = thread / 32 * 16, lane = thread % 32;
  float s[kAttentionShort / 8][4];
  if constexpr (kRelative)
    init_scores<kAttentionShort / 8>(first_score(relative, head, query, lane),
                                     [&](int n, int i) -> float& { return s[n][i]; });
  cp_async_wait<0>();
  sync_pair(pair);
  if (query >= tile.length) return;
  Warp work;
  work.start(queries + query * Warp::kPitch, lane);
  if constexpr (kWindow) {
    work.template step<kRelative>(keys, values, tile.length, scale_log2, s, lane,
                                  [&](auto& scores) { mask_keys(scores, query + lane / 4, 2 * (lane % 4), window); });
  } else {
    work.template step<kRelative>(keys, values, tile.length, scale_log2, s, lane);
  }
  const size_t row = size_t(tile.first_row) + query;
  const int rows = min(16, tile.length - query);
  if constexpr (std::is_same_v<Context, QuantizedBlocks>) {
    work.finish(context, int(row), rows, head, heads, lane);
  } else {
    work.finish(context + row * heads * dim + head * dim, size_t(heads) * dim, rows, dim, lane);
  }
}

}  // namespace embert
