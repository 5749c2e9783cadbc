// A tile of attention on sm_80 and later: 64 query rows of a (sequence, head) by a block of four warps, which iterates
// over the keys with two steps in shared memory. The common part of sm80.cu's and sm80_decoder.cu's kernels.
#pragma once

#include "attention/warp.cuh"
#include "common/launch.cuh"
#include "common/launch.h"
#include "ops/attention_work.h"

namespace embert {

constexpr int kTileWarps = 4;
constexpr int kTileThreads = kTileWarps * 32;
// Keys of a step. At 256 columns, 64 would not fit the registers, nor the shared memory of any GPU but A100 and H100.
template <int kDim>
constexpr int kStepKeys = kDim <= 128 ? 64 : 32;

template <typename T, int kDim>
constexpr size_t tile_shared_bytes() {  // Q, then two steps of K and V
  return size_t(kAttentionRows + 4 * kStepKeys<kDim>) * (kDim + 8) * sizeof(T);
}

// The same as copy_head_rows for rows of keys or values which lie in two places: the first `shared` ones in `prefix`.
template <typename T, int kDim, int kRows, int kThreads>
__device__ __forceinline__ void copy_shared_rows(T* to, const T* prefix, const T* own, int shared, size_t pitch,
                                                 int valid, int dim, int thread) {
  constexpr int kPacks = kDim / 8, kPitch = kDim + 8;
#pragma unroll
  for (int i = thread; i < kRows * kPacks; i += kThreads) {
    const int row = i / kPacks, pack = i % kPacks;
    const bool copies = row < valid && pack * 8 < dim;
    const T* const from = (row < shared ? prefix : own) + row * pitch + pack * 8;
    cp_async(shared_address(to + row * kPitch + pack * 8), copies ? from : prefix, copies);
  }
}

// A block's tile `tiles[index]`, of the head blockIdx.x. With a window, steps are those between the first and the last
// key that a query of the tile attends to. They begin at the same multiples of kKeys as without a window.
template <typename T, int kDim, bool kRelative, bool kWindow, typename Columns, typename Prefixes = NoPrefixes>
__device__ __forceinline__ void attend_tile(const T* qkv, const AttentionTile* tiles, unsigned index, float scale_log2,
                                            T* context, Queries queries, const RelativeScores& relative,
                                            const Columns& columns, const KeyWindow& window,
                                            const Prefixes& prefixes = {}) {
  const int heads = columns.heads, dim = columns.dim;
  constexpr int kKeys = kStepKeys<kDim>;
  using Warp = AttentionWarp<T, kDim, kKeys>;
  static_assert(kAttentionRows == 16 * kTileWarps, "a warp owns 16 query rows");
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  T* const query_rows = reinterpret_cast<T*>(shared_bytes);
  T* const keys = query_rows + kAttentionRows * Warp::kPitch;  // [2][kKeys][kPitch]
  T* const values = keys + 2 * kKeys * Warp::kPitch;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();

  const int head = blockIdx.x;  // heads of one tile run side by side: their rows are adjacent in memory
  const AttentionTile tile = tiles[index];
  if (tile.length == 0 || !is_needed(tile, queries, kAttentionRows)) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const size_t pitch = columns.pitch();
  const T* const q_from = qkv + size_t(tile.first_row) * pitch + head * dim;
  const T* const k_from = q_from + columns.keys(head);
  const T* const v_from = k_from + columns.keys_to_values();
  int first_step = 0, steps = (tile.length + kKeys - 1) / kKeys;  // the first step, and the end of the steps
  if constexpr (kWindow) {
    steps = window.end_step(tile.query + kAttentionRows - 1, tile.length, kKeys);
    first_step = window.first_step(tile.query, steps, kKeys);
  }
  const TilePrefix prefix = prefixes[index];
  const auto fetch = [&](int step) {
    const int slot = step % 2, key = step * kKeys;
    if constexpr (!std::is_same_v<Prefixes, NoPrefixes>) {
      if (key < prefix.tokens) {
        const T* const keys_from = qkv + (prefix.row + key) * pitch + head * dim + columns.keys(head);
        const auto copy = [&](T* to, const T* from, const T* own) {
          copy_shared_rows<T, kDim, kKeys, kTileThreads>(to + slot * kKeys * Warp::kPitch, from, own + key * pitch,
                                                         prefix.tokens - key, pitch, tile.length - key, dim,
                                                         threadIdx.x);
        };
        copy(keys, keys_from, k_from);
        copy(values, keys_from + columns.keys_to_values(), v_from);
        return;
      }
    }
    copy_head_rows<T, kDim, kKeys, kTileThreads>(keys + slot * kKeys * Warp::kPitch, k_from + key * pitch, pitch,
                                                 tile.length - key, dim, threadIdx.x);
    copy_head_rows<T, kDim, kKeys, kTileThreads>(values + slot * kKeys * Warp::kPitch, v_from + key * pitch, pitch,
                                                 tile.length - key, dim, threadIdx.x);
  };

  copy_head_rows<T, kDim, kAttentionRows, kTileThreads>(query_rows, q_from + tile.query * pitch, pitch,
                                                        tile.tokens() - tile.query, dim, threadIdx.x);
  fetch(first_step);
  cp_async_commit();
  const int rows = min(16, tile.tokens() - tile.query - warp * 16);  // of this warp; a warp without rows only loads
  Warp work;
  for (int step = first_step; step < steps; ++step) {
    if (step + 1 < steps) fetch(step + 1);
    cp_async_commit();
    float s[kKeys / 8][4];
    if constexpr (kRelative)
      init_scores<kKeys / 8>(first_score(relative, head, tile.query + warp * 16 - step * kKeys, lane),
                             [&](int n, int i) -> float& { return s[n][i]; });
    cp_async_wait<1>();
    __syncthreads();
    if (rows > 0) {
      if (step == first_step) work.start(query_rows + warp * 16 * Warp::kPitch, lane);
      const T* const k = keys + (step % 2) * kKeys * Warp::kPitch;
      const T* const v = values + (step % 2) * kKeys * Warp::kPitch;
      const int left = tile.length - step * kKeys;
      if constexpr (kWindow) {
        const int query = tile.query + warp * 16, key = step * kKeys;  // the warp's first
        const bool sees_all = window.sees_all(query, 16, key, kKeys);
        work.template step<kRelative>(k, v, left, scale_log2, s, lane, [&](auto& scores) {
          if (!sees_all) mask_keys(scores, query + lane / 4, key + 2 * (lane % 4), window);
        });
      } else {
        work.template step<kRelative>(k, v, left, scale_log2, s, lane);
      }
    }
    __syncthreads();  // all warps have read this slot before it is overwritten
  }
  if (rows > 0) {
    if constexpr (kWindow) clear_unseeing(work.sum, tile.query + warp * 16 + lane / 4, tile.length, window);
    const size_t row = size_t(tile.first_row) + tile.query + warp * 16;
    work.finish(context + row * heads * dim + head * dim, size_t(heads) * dim, rows, dim, lane);
  }
}

// Launches `blocks` blocks for each of `count` entries of a work list.
template <typename Kernel, typename... Arguments>
Status launch_work(const char* name, Kernel kernel, int blocks, int count, size_t shared_bytes, const Stream& stream,
                   const Arguments&... arguments) {
  if (count == 0) return {};
  EMBERT_TRY(allow_shared_memory(kernel, shared_bytes));
  return launch(name, kernel, dim3(blocks, count), kTileThreads, shared_bytes, stream, arguments...);
}

}  // namespace embert
