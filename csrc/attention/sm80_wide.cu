// Attention of heads of over 256 and up to 512 columns for 16-bit storage, on sm_80 and later: of decoders, causal or
// with windows. Texts of all lengths take tiles.
//
// The registers of a warp hold 256 columns of a head (sm80_decoder.cu). So a block is two groups of four warps with the
// same 64 queries, and each group has half of the columns of Q, K and V. The scores of a step are the sums of what both
// groups multiply, which they exchange through shared memory; a sum of two numbers is the same in both orders, so
// both compute the same weights. A step has 32 keys where 148 KB of shared memory allow it, otherwise 16.
//
// By count, a step of 32 keys reads 256 KB of shared memory, 2 048 cycles, and its products take 1 024: half of the
// matrix unit's speed is the limit. On an H100 there is one block a multiprocessor.

#include "attention/attention.h"
#include "attention/tile.cuh"
#include "common/barrier.cuh"

namespace embert {
namespace {

constexpr int kGroups = 2, kGroupColumns = 256;
constexpr int kPairBarriers = 1;  // the first of four: two warps with the same queries each

template <typename T, int kKeys>
struct WideLayout {
  using Warp = AttentionWarp<T, kGroupColumns, kKeys>;
  static constexpr int kStepElements = kKeys * Warp::kPitch;  // of K, and of V, of one group
  static constexpr int kGroupElements = 4 * kStepElements;    // two steps of both
  static constexpr int kScores = kKeys / 8 * 32;              // of a warp, four floats each
  static constexpr size_t kSharedBytes =
      size_t(kGroups) * (kGroupElements * sizeof(T) + kTileWarps * kScores * sizeof(float4));
  static_assert(kAttentionRows * Warp::kPitch <= kGroupElements, "Q passes through the memory of K and V");
};

template <typename T, int kKeys>
__global__ void __launch_bounds__(kGroups* kTileThreads, 1)
    attention_sm80_wide_kernel(const T* qkv, const AttentionTile* tiles, SharedKeys columns, float scale_log2,
                               T* context, Queries queries, KeyWindow window) {
  using At = WideLayout<T, kKeys>;
  using Warp = typename At::Warp;
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const AttentionTile tile = tiles[gridDim.y - 1 - blockIdx.y];
  if (tile.length == 0 || !is_needed(tile, queries, kAttentionRows)) return;
  const int head = blockIdx.x, group = threadIdx.x / kTileThreads, thread = threadIdx.x % kTileThreads;
  const int warp = thread / 32, lane = thread % 32;
  const int first_column = group * kGroupColumns, dim = min(columns.dim - first_column, kGroupColumns);
  T* const keys = reinterpret_cast<T*>(shared_bytes) + group * At::kGroupElements;  // [2][kKeys][kPitch]
  T* const values = keys + 2 * At::kStepElements;
  auto* const scores = reinterpret_cast<float4*>(shared_bytes + kGroups * At::kGroupElements * sizeof(T));
  float4* const own = scores + (group * kTileWarps + warp) * At::kScores + lane;
  const float4* const other = scores + ((1 - group) * kTileWarps + warp) * At::kScores + lane;

  const size_t pitch = columns.pitch();
  const T* const q_from = qkv + size_t(tile.first_row) * pitch + head * columns.dim + first_column;
  const T* const k_from = q_from + columns.keys(head);
  const T* const v_from = k_from + columns.keys_to_values();
  const int steps = window.end_step(tile.query + kAttentionRows - 1, tile.length, kKeys);
  const int first_step = window.first_step(tile.query, steps, kKeys);
  const auto fetch = [&](int step) {
    const int slot = step % 2 * At::kStepElements, key = step * kKeys;
    copy_head_rows<T, kGroupColumns, kKeys, kTileThreads>(keys + slot, k_from + key * pitch, pitch, tile.length - key,
                                                          dim, thread);
    copy_head_rows<T, kGroupColumns, kKeys, kTileThreads>(values + slot, v_from + key * pitch, pitch, tile.length - key,
                                                          dim, thread);
  };

  copy_head_rows<T, kGroupColumns, kAttentionRows, kTileThreads>(keys, q_from + tile.query * pitch, pitch,
                                                                 tile.tokens() - tile.query, dim, thread);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  const int rows = min(16, tile.tokens() - tile.query - warp * 16);  // of this warp; a warp without rows only loads
  Warp work;
  if (rows > 0) work.start(keys + warp * 16 * Warp::kPitch, lane);
  __syncthreads();
  fetch(first_step);
  cp_async_commit();
  for (int step = first_step; step < steps; ++step) {
    if (step + 1 < steps) fetch(step + 1);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    if (rows > 0) {
      const int slot = step % 2 * At::kStepElements;
      const int query = tile.query + warp * 16, key = step * kKeys;  // the warp's first
      const bool sees_all = window.sees_all(query, 16, key, kKeys);
      float s[kKeys / 8][4];
      work.template step<false>(keys + slot, values + slot, tile.length - key, scale_log2, s, lane, [&](auto& sums) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) own[n * 32] = {sums[n][0], sums[n][1], sums[n][2], sums[n][3]};
        named_barrier_sync(kPairBarriers + warp, kGroups * 32);
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          const float4 rest = other[n * 32];
          sums[n][0] += rest.x, sums[n][1] += rest.y, sums[n][2] += rest.z, sums[n][3] += rest.w;
        }
        if (!sees_all) mask_keys(sums, query + lane / 4, key + 2 * (lane % 4), window);
      });
    }
    __syncthreads();  // all warps have read this slot, and the scores, before they are overwritten
  }
  if (rows > 0) {
    clear_unseeing(work.sum, tile.query + warp * 16 + lane / 4, tile.length, window);
    const size_t row = size_t(tile.first_row) + tile.query + warp * 16,
                 row_columns = size_t(columns.heads) * columns.dim;
    work.finish(context + row * row_columns + head * columns.dim + first_column, row_columns, rows, dim, lane);
  }
}

template <typename T, int kKeys>
Status launch_wide(const void* qkv, const WindowedWork& work, const AttentionHeads& shape, void* context,
                   const Stream& stream) {
  const SharedKeys columns{shape.heads, shape.kv_heads, shape.heads / shape.kv_heads, shape.head_size};
  const float scale_log2 = float(1.4426950408889634 * scale_of(shape));
  const auto kernel = attention_sm80_wide_kernel<T, kKeys>;
  constexpr size_t kBytes = WideLayout<T, kKeys>::kSharedBytes;
  EMBERT_TRY(allow_shared_memory(kernel, kBytes));
  const auto run = [&](const AttentionTile* tiles, int count) {
    return launch("attention_sm80_wide", kernel, dim3(shape.heads, count), kGroups * kTileThreads, kBytes, stream,
                  static_cast<const T*>(qkv), tiles, columns, scale_log2, static_cast<T*>(context), work.queries,
                  window_of(work.window, shape.causal));
  };
  EMBERT_TRY(run(work.tiles, work.tile_count));
  return run(work.shorts, work.short_count);
}

}  // namespace

Status attention_sm80_wide(DType dtype, const void* qkv, const WindowedWork& work, const AttentionHeads& shape,
                           void* context, const Stream& stream) {
  int device = 0, most = 0;
  EMBERT_CUDA(cudaGetDevice(&device));
  EMBERT_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return with_half_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const bool many = size_t(most) >= WideLayout<T, 32>::kSharedBytes;
    return (many ? launch_wide<T, 32> : launch_wide<T, 16>)(qkv, work, shape, context, stream);
  });
}

}  // namespace embert
