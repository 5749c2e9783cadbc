// softmax(Q·Kᵀ/√d)·V within each sequence of a packed batch, for 16-bit storage; sm_80 and later.
//
// There are two kernels. Only a sequence's own length selects between them, so results are batch-invariant:
//   - up to 32 tokens: short.cuh.
//   - more: a block of 4 warps processes 64 query rows of a (sequence, head) and iterates over the keys 64 at a time,
//     with two steps in flight. On Hopper sm90.cu does this for head sizes 32 and 64, together with the short
//     sequences.
//
// Floor for BERT-base and 26 692 tokens: qkv read and context written, 164 MB, 55 µs at 3 TB/s; 10.7 GFLOP at a mean
// length of 104.

#include <cmath>

#include "attention/attention.h"
#include "attention/short.cuh"
#include "common/launch.cuh"
#include "ops/attention_work.h"

namespace embert {

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kKeys = 64;

template <typename T, int kDim>
constexpr size_t long_shared_bytes() {  // Q, then two steps of K and V
  return size_t(kAttentionRows + 4 * kKeys) * (kDim + 8) * sizeof(T);
}

// With a window, steps are those between the first and the last key that a query of the tile attends to. They begin at
// the same multiples of kKeys as without a window.
template <typename T, int kDim, bool kRelative, bool kWindow>
__device__ __forceinline__ void attend_tile(const T* qkv, const AttentionTile* tiles, int heads, int dim,
                                            float scale_log2, T* context, Queries queries,
                                            const RelativeScores& relative, const KeyWindow& window) {
  using Warp = AttentionWarp<T, kDim, kKeys>;
  static_assert(kAttentionRows == 16 * kWarps, "a warp owns 16 query rows");
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  T* const query_rows = reinterpret_cast<T*>(shared_bytes);
  T* const keys = query_rows + kAttentionRows * Warp::kPitch;  // [2][kKeys][kPitch]
  T* const values = keys + 2 * kKeys * Warp::kPitch;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();

  const int head = blockIdx.x;  // heads of one tile run side by side: their rows are adjacent in memory
  const AttentionTile tile = tiles[blockIdx.y];
  if (tile.length == 0 || !is_needed(tile, queries, kAttentionRows)) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const size_t pitch = size_t(3) * heads * dim;
  const T* const q_from = qkv + size_t(tile.first_row) * pitch + head * dim;
  const T* const k_from = q_from + heads * dim;
  const T* const v_from = k_from + heads * dim;
  int first_step = 0, steps = (tile.length + kKeys - 1) / kKeys;  // the first step, and the end of the steps
  if constexpr (kWindow) {
    first_step = window.first_step(tile.query, kKeys);
    steps = window.end_step(tile.query + kAttentionRows - 1, tile.length, kKeys);
  }
  const auto fetch = [&](int step) {
    const int slot = step % 2, key = step * kKeys;
    copy_head_rows<T, kDim, kKeys, kThreads>(keys + slot * kKeys * Warp::kPitch, k_from + key * pitch, pitch,
                                             tile.length - key, dim, threadIdx.x);
    copy_head_rows<T, kDim, kKeys, kThreads>(values + slot * kKeys * Warp::kPitch, v_from + key * pitch, pitch,
                                             tile.length - key, dim, threadIdx.x);
  };

  copy_head_rows<T, kDim, kAttentionRows, kThreads>(query_rows, q_from + tile.query * pitch, pitch,
                                                    tile.length - tile.query, dim, threadIdx.x);
  fetch(first_step);
  cp_async_commit();
  const int rows = min(16, tile.length - tile.query - warp * 16);  // of this warp; a warp without rows only loads
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
    const size_t row = size_t(tile.first_row) + tile.query + warp * 16;
    work.finish(context + row * heads * dim + head * dim, size_t(heads) * dim, rows, dim, lane);
  }
}

// 128 registers a thread: four blocks a multiprocessor, where shared memory allows them.
template <typename T, int kDim, bool kRelative>
__global__ void __launch_bounds__(kThreads, kDim <= 64 ? 4 : 2)
    attention_sm80_kernel(const T* qkv, const AttentionTile* tiles, int heads, int dim, float scale_log2, T* context,
                          Queries queries, const RelativeScores relative) {
  attend_tile<T, kDim, kRelative, false>(qkv, tiles, heads, dim, scale_log2, context, queries, relative, {});
}
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads, kDim <= 64 ? 4 : 2)
    attention_sm80_window_kernel(const T* qkv, const AttentionTile* tiles, int heads, int dim, float scale_log2,
                                 T* context, Queries queries, int window) {
  attend_tile<T, kDim, false, true>(qkv, tiles, heads, dim, scale_log2, context, queries, {}, {window});
}

template <typename T, int kDim, bool kRelative>
__global__ void __launch_bounds__(kThreads)
    attention_sm80_short_kernel(const T* qkv, const AttentionTile* shorts, int heads, int dim, float scale_log2,
                                T* context, const RelativeScores relative) {
  static_assert(kThreads == kShortPairs * 64, "a pair of warps a head");
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  const int pair = threadIdx.x / 64, head = blockIdx.x * kShortPairs + pair;
  const AttentionTile tile = early_tile(shorts + blockIdx.y);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // not earlier: gemm/kernels/small_m.cuh
  if (tile.length == 0 || head >= heads) return;
  attend_short<T, kDim, kRelative>(qkv, tile, head, heads, dim, scale_log2, relative, context, shared_bytes, pair,
                                   threadIdx.x % 64);
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads)
    attention_sm80_short_window_kernel(const T* qkv, const AttentionTile* shorts, int heads, int dim, float scale_log2,
                                       T* context, int window) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  const int pair = threadIdx.x / 64, head = blockIdx.x * kShortPairs + pair;
  const AttentionTile tile = early_tile(shorts + blockIdx.y);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (tile.length == 0 || head >= heads) return;
  attend_short<T, kDim, false, true>(qkv, tile, head, heads, dim, scale_log2, {}, context, shared_bytes, pair,
                                     threadIdx.x % 64, {window});
}

// One block per tile and head.
template <typename T, int kDim, typename Kernel, typename... Rest>
Status launch_tiles(const char* name, Kernel kernel, const void* qkv, const WindowedWork& work, int heads, int dim,
                    float scale_log2, void* context, const Stream& stream, Rest... rest) {
  if (work.tile_count == 0) return {};
  constexpr size_t kBytes = long_shared_bytes<T, kDim>();
  if (kBytes > 48 * 1024)
    EMBERT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  return launch(name, kernel, dim3(heads, work.tile_count), kThreads, kBytes, stream, static_cast<const T*>(qkv),
                work.tiles, heads, dim, scale_log2, static_cast<T*>(context), work.queries, rest...);
}

// One block per two short texts and head.
template <typename T, int kDim, typename Kernel, typename Last>
Status launch_shorts(const char* name, Kernel kernel, const void* qkv, const WindowedWork& work, int heads, int dim,
                     float scale_log2, void* context, const Stream& stream, const Last& last) {
  if (work.short_count == 0) return {};
  constexpr size_t kBytes = short_shared_bytes<T, kDim>();
  if (kBytes > 48 * 1024)
    EMBERT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  return launch(name, kernel, dim3((heads + kShortPairs - 1) / kShortPairs, work.short_count), kThreads, kBytes, stream,
                static_cast<const T*>(qkv), work.shorts, heads, dim, scale_log2, static_cast<T*>(context), last);
}

template <typename T, int kDim, bool kRelative>
Status launch_attention(const void* qkv, const WindowedWork& work, int heads, int dim, const RelativeScores& relative,
                        void* context, const Stream& stream) {
  const float scale_log2 = float(1.4426950408889634 / std::sqrt(double(dim)));
  const auto shorts = [&](const char* name, auto kernel, const auto& last) {
    return launch_shorts<T, kDim>(name, kernel, qkv, work, heads, dim, scale_log2, context, stream, last);
  };
  if constexpr (!kRelative) {
    if (work.window > 0) {
      EMBERT_TRY((launch_tiles<T, kDim>("attention_sm80_window", attention_sm80_window_kernel<T, kDim>, qkv, work,
                                        heads, dim, scale_log2, context, stream, work.window)));
      // A wider window masks nothing in a short text.
      if (work.window < kAttentionShort - 1)
        return shorts("attention_short_window", attention_sm80_short_window_kernel<T, kDim>, work.window);
      return shorts("attention_short", attention_sm80_short_kernel<T, kDim, false>, relative);
    }
  }
  EMBERT_TRY((launch_tiles<T, kDim>("attention_sm80", attention_sm80_kernel<T, kDim, kRelative>, qkv, work, heads, dim,
                                    scale_log2, context, stream, relative)));
  return shorts("attention_short", attention_sm80_short_kernel<T, kDim, kRelative>, relative);
}

template <typename T, bool kRelative>
Status attention_of(const void* qkv, const WindowedWork& work, int heads, int dim, const RelativeScores& relative,
                    void* context, const Stream& stream) {
  if (dim <= 32) return launch_attention<T, 32, kRelative>(qkv, work, heads, dim, relative, context, stream);
  if (dim <= 64) return launch_attention<T, 64, kRelative>(qkv, work, heads, dim, relative, context, stream);
  if (dim <= 96) return launch_attention<T, 96, kRelative>(qkv, work, heads, dim, relative, context, stream);
  return launch_attention<T, 128, kRelative>(qkv, work, heads, dim, relative, context, stream);
}

}  // namespace

Status attention_sm80(DType dtype, const void* qkv, const WindowedWork& work, int heads, int head_size,
                      const RelativeScores& relative, void* context, const Stream& stream) {
  const auto run = [&](auto plain, auto with_relative) {
    return (relative.scores == nullptr ? plain : with_relative)(qkv, work, heads, head_size, relative, context, stream);
  };
  if (dtype == DType::kFloat16) return run(attention_of<half_t, false>, attention_of<half_t, true>);
  return run(attention_of<bfloat_t, false>, attention_of<bfloat_t, true>);
}

}  // namespace embert
