// A tile of attention on Hopper, for one warpgroup: the common part of sm90.cu's kernels.
#pragma once

#include <type_traits>

#include "attention/short.cuh"
#include "attention/window.h"
#include "common/barrier.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/tma.cuh"
#include "common/warp.cuh"
#include "ops/attention_work.h"

namespace embert::sm90 {

constexpr int kTileThreads = 128;  // a warpgroup
constexpr int kTileRows = 64;      // of Q, and keys of a step
static_assert(kTileRows == kAttentionRows, "a warpgroup takes a tile of the work list");
// Blocks per multiprocessor, and so registers per thread: 96 and 80. With one more block they spill.
template <int kDim>
constexpr int kBlocks = kDim == 64 ? 5 : 6;

template <int kDim>
struct Layout {
  static constexpr int kRowBytes = kDim * 2, kChunks = kRowBytes / 16;
  // The number that fits the shared memory of these blocks.
  static constexpr int kStages = kDim == 64 ? 2 : 4;
  static constexpr int kTileBytes = kTileRows * kRowBytes;
  static constexpr int kQ = 0, kK = kTileBytes, kV = kK + kStages * kTileBytes;
  static constexpr int kBarriers = kV + kStages * kTileBytes;  // one per stage; Q arrives at that of the first stage
  static constexpr int kSharedBytes = kBarriers + kStages * 8;
  static_assert(short_shared_bytes<half_t, kDim>() <= kSharedBytes, "short sequences fit");
};

template <int kDim>
__device__ __forceinline__ uint64_t rows_operand(uint32_t address) {
  return kDim == 64 ? make_descriptor(address) : make_narrow_descriptor(address);
}
// The offset at which TMA stores a 16-byte chunk of a row.
template <int kDim>
__device__ __forceinline__ uint32_t place_of(int row, int chunk) {
  return kDim == 64 ? swizzle_128b(row, chunk) : row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
}

// Replaces the values of a step's keys from `valid` on by zeros, for a warpgroup; all keys but the last 32 are valid.
// Those rows belong to the next text. Their weights are 0, but 0 · infinity is NaN. A barrier must follow.
template <int kDim, int kKeys>
__device__ __forceinline__ void clear_values(uint8_t* values, int valid) {
  using At = Layout<kDim>;
  const int thread = threadIdx.x % kTileThreads, row = thread / At::kChunks;
  uint8_t* const place = values + place_of<kDim>(row, thread % At::kChunks);
#pragma unroll
  for (int from = kKeys - kTileRows / 2; from < kKeys; from += kTileThreads / At::kChunks) {
    if (from + row >= valid) *reinterpret_cast<uint4*>(place + from * At::kRowBytes) = uint4{0, 0, 0, 0};
  }
  fence_async_proxy();
}

// A barrier of the warps of a warpgroup, of two of a block.
__device__ __forceinline__ void sync_group(int group) {
  named_barrier_sync_either<kGroupBarrier, kTileThreads>(group);
}

// A lane's part of a wgmma result, as tiles of 8 columns.
template <int kElements>
__device__ __forceinline__ float (&tiles(float (&elements)[kElements]))
    [kElements / 4][4] { return reinterpret_cast<float (&)[kElements / 4][4]>(elements); }

// Which keys a tile's queries attend to, and in which steps of 64. `mask` removes the keys of a step that a row does
// not attend to from its scores.
struct AllKeys {
  static constexpr bool kMayBeEmpty = false;  // whether a row may have no key in a step, or at all
  __device__ __forceinline__ constexpr int first(const AttentionTile&) const { return 0; }
  __device__ __forceinline__ int end(const AttentionTile& tile) const {
    return (tile.length + kTileRows - 1) / kTileRows;
  }
  template <int kElements>
  __device__ __forceinline__ void mask(float (&s)[kElements], const AttentionTile& tile, int step, int /* warp */,
                                       int lane) const {
    constexpr int kKeys = 2 * kElements;
    const int valid = tile.length - step * kTileRows;
    if (valid < kKeys) {
      const int left = valid - 2 * (lane % 4);
#pragma unroll
      for (int i = (kKeys - kTileRows / 2) / 2; i < kKeys / 2; ++i) {
        if (i / 4 * 8 + i % 2 >= left) s[i] = -INFINITY;
      }
    }
  }
};

// Replaces the scores of a step of keys that a window or the text's end hides, by `hidden`: in steps where one of the
// warp's 16 rows does not attend to all keys. `query`, `key`: the first of the warp and of the step.
template <int kElements>
__device__ __forceinline__ void mask_window(float (&s)[kElements], const KeyWindow& window, int query, int key,
                                            int length, int lane, float hidden) {
  constexpr int kKeys = 2 * kElements;
  if (key + kKeys <= length && window.sees_all(query, 16, key, kKeys)) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = query + lane / 4 + 8 * half;
    const int first = window.place(row, key + 2 * (lane % 4)), count = window.count(row, length);
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (unsigned(first + 8 * n + i) >= unsigned(count)) s[4 * n + 2 * half + i] = hidden;
      }
  }
}

struct NearKeys {
  static constexpr bool kMayBeEmpty = true;
  KeyWindow window;

  __device__ __forceinline__ int first(const AttentionTile& tile) const {
    return window.first_step(tile.query, end(tile), kTileRows);
  }
  __device__ __forceinline__ int end(const AttentionTile& tile) const {
    return window.end_step(tile.query + kTileRows - 1, tile.length, kTileRows);
  }
  template <int kElements>
  __device__ __forceinline__ void mask(float (&s)[kElements], const AttentionTile& tile, int step, int warp,
                                       int lane) const {
    mask_window(s, window, tile.query + warp * 16, step * kTileRows, tile.length, lane, -INFINITY);
  }
};

// The softmax of a step: replaces scores by weights, as P·V's left operand, and rescales the sums of earlier steps.
template <typename T, bool kMayBeEmpty, int kElements, int kOut>
__device__ __forceinline__ void softmax_and_scale(float (&s)[kElements], uint32_t (&p)[kElements / 8][4],
                                                  float (&out)[kOut], float (&maximum)[2], float (&sum)[2],
                                                  float scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float correction = online_softmax<kMayBeEmpty>(tiles(s), half, maximum[half], sum[half], scale_log2);
#pragma unroll
    for (int n = 0; n < kElements / 4; ++n)
      p[n / 2][2 * (n % 2) + half] = pack_two<T>(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]);
    rescale(tiles(out), half, correction);
  }
}

// Divides by the sums and stores a warp's `rows` (≤ 16) rows of a head. They pass through shared memory that
// no other warp uses, so that lanes store 16 bytes of a row.
template <typename T, int kDim>
__device__ __forceinline__ void store_context(uint8_t* rows_of_warp, const float (&out)[kDim / 2],
                                              const float (&sum)[2], int rows, T* context, int first_row, int head,
                                              int heads, int lane) {
  using At = Layout<kDim>;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float inverse = __fdividef(1.0f, row_total(sum[half]));  // of at least 1, the largest score's weight
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      *reinterpret_cast<uint32_t*>(rows_of_warp + 8 * half * At::kRowBytes + place_of<kDim>(lane / 4, n) +
                                   lane % 4 * 4) =
          pack_two<T>(out[4 * n + 2 * half] * inverse, out[4 * n + 2 * half + 1] * inverse);
    }
  }
  __syncwarp();
  constexpr int kAtOnce = 32 / At::kChunks;
  const int row = lane / At::kChunks, chunk = lane % At::kChunks;
  T* to = context + (size_t(first_row + row) * heads + head) * kDim + chunk * 8;
#pragma unroll
  for (int i = 0; i < 16; i += kAtOnce) {
    if (row + i < rows)
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(rows_of_warp + i / 8 * 8 * At::kRowBytes +
                                                                      place_of<kDim>(row + i % 8, chunk));
    to += kAtOnce * heads * kDim;
  }
}

// The same in int8, with the head as a block; this divides by the sums, too.
template <int kDim>
__device__ __forceinline__ void store_blocks(uint8_t* rows_of_warp, const float (&out)[kDim / 2], const float (&sum)[2],
                                             int rows, const QuantizedBlocks& context, int first_row, int head,
                                             int heads, int lane) {
  constexpr int kChunks = kDim / 16;  // of 16 bytes in a row
  static_assert(kChunks == 4, "how chunks are mixed");
  const HeadBlocks<kDim> blocks([&](int n, int i) { return out[4 * n + i]; }, sum);
  blocks.store_maxima(context, first_row, rows, head, heads, lane);
  // Chunks are swizzled so that eight rows' words lie in different banks.
  const auto place = [&](int row, int chunk) { return rows_of_warp + row * kDim + (chunk ^ (row >> 1 & 3)) * 16; };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      *reinterpret_cast<uint32_t*>(place(lane / 4 + 8 * half, i) + lane % 4 * 4) = blocks.bytes[half][i];
  }
  __syncwarp();
#pragma unroll
  for (int i = lane; i < 16 * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (row < rows)
      *reinterpret_cast<uint4*>(context.data + (size_t(first_row + row) * heads + head) * kDim + chunk * 16) =
          *reinterpret_cast<const uint4*>(place(row, chunk));
  }
}

// Runs a block: a tile, or two short texts. Keys: AllKeys or NearKeys; Context: T* or QuantizedBlocks.
template <typename T, int kDim, bool kRelative, typename Keys, typename Context>
__device__ __forceinline__ void attend_tile(const CUtensorMap& qkv_map, const T* qkv, const AttentionWork& work,
                                            int heads, float scale_log2, const Context& context, bool backwards,
                                            const RelativeScores& relative, const Keys& keys) {
  using At = Layout<kDim>;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = shared_address(smem), barriers = base + At::kBarriers;
  const int warp = warp_index(), lane = threadIdx.x % 32;
  // Heads of one tile run side by side: their rows are adjacent in memory.
  const int head = blockIdx.x, index = blockIdx.y;
  if (index >= work.tile_count) {
    const int pair = warp / 2, at = (index - work.tile_count) * kShortPairs + pair;
    const AttentionTile tile = at < work.short_count ? early_tile(work.shorts + at) : AttentionTile{};
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (tile.length > 0)
      attend_short<T, kDim, kRelative>(qkv, tile, head, scale_log2, relative, context, smem, pair, threadIdx.x % 64,
                                       OwnKeys{heads, kDim});
    return;
  }
  const AttentionTile tile = early_tile(work.tiles + (backwards ? work.tile_count - 1 - index : index));
  if (warp == 0) {  // this warp issues the loads; the others need the barriers later
    if (elect_one()) {
      prefetch_tensor_maps(qkv_map);
      for (int stage = 0; stage < At::kStages; ++stage) mbarrier_init(barriers + 8 * stage, 1);
      fence_mbarrier_init();
    }
    __syncwarp();
  }
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // not earlier: gemm/kernels/small_m.cuh
  if (tile.length == 0 || !is_needed(tile, work.queries, kTileRows)) return;
  const int first = keys.first(tile), steps = keys.end(tile);
  const auto fetch = [&](int step, bool with_q = false) {  // for an elected lane (common/warp.cuh)
    const int stage = (step - first) % At::kStages, row = tile.first_row + step * kTileRows;
    const uint32_t barrier = barriers + 8 * stage;
    mbarrier_arrive_expect_tx(barrier, (with_q ? 3 : 2) * At::kTileBytes);
    if (with_q) tma_load(&qkv_map, base + At::kQ, barrier, head * kDim, tile.first_row + tile.query);
    tma_load(&qkv_map, base + At::kK + stage * At::kTileBytes, barrier, (heads + head) * kDim, row);
    tma_load(&qkv_map, base + At::kV + stage * At::kTileBytes, barrier, (2 * heads + head) * kDim, row);
  };
  if (warp == 0 && elect_one()) {
    fetch(first, true);
#pragma unroll
    for (int step = 1; step < At::kStages; ++step) {
      if (first + step < steps) fetch(first + step);
    }
  }
  __syncthreads();

  const float* const relative_scores = kRelative ? first_score(relative, head, tile.query + warp * 16, lane) : nullptr;
  float out[kDim / 2];
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};  // of rows lane / 4 and lane / 4 + 8 of the warp's
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) out[i] = 0.0f;

  const auto attend = [&](int step, auto count) {
    constexpr int kKeys = decltype(count)::value;
    const int stage = (step - first) % At::kStages;
    const uint32_t k_from = base + At::kK + stage * At::kTileBytes, v_from = base + At::kV + stage * At::kTileBytes;
    const int valid = tile.length - step * kTileRows;
    float s[kKeys / 2];
    if constexpr (kRelative)  // the products add to these, which are loaded while the copies are in flight
      init_scores<kKeys / 8>(relative_scores + step * kTileRows, [&](int n, int i) -> float& { return s[4 * n + i]; });
    mbarrier_wait(barriers + 8 * stage, (step - first) / At::kStages % 2);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
      wgmma<T>(s, advance_descriptor(rows_operand<kDim>(base + At::kQ), k * 32),
               advance_descriptor(rows_operand<kDim>(k_from), k * 32), kRelative || k > 0);
    wgmma_commit();
    if (valid < kKeys) {
      clear_values<kDim, kKeys>(smem + (v_from - base), valid);
      __syncthreads();
    }
    wgmma_wait_all(s);

    keys.mask(s, tile, step, warp, lane);
    uint32_t p[kKeys / 16][4];
    softmax_and_scale<T, Keys::kMayBeEmpty>(s, p, out, maximum, sum, scale_log2);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      wgmma_rs_mn_major<T>(out, p[k], rows_operand<kDim>(v_from + k * 16 * At::kRowBytes), true);
    wgmma_commit();
    wgmma_wait_all(out);
    if (step + At::kStages < steps) {
      __syncthreads();  // all warps have read this stage
      if (warp == 0 && elect_one()) fetch(step + At::kStages);
    }
  };
  const bool ends_short = tile.length - (steps - 1) * kTileRows <= kTileRows / 2;
  const int full_steps = ends_short ? steps - 1 : steps;
  for (int step = first; step < full_steps; ++step) attend(step, std::integral_constant<int, kTileRows>());
  if (ends_short) attend(full_steps, std::integral_constant<int, kTileRows / 2>());

  // Results pass through Q's memory, which no warp reads any more, so that lanes store 16 bytes of a row.
  __syncthreads();
  const int rows = min(16, tile.tokens() - tile.query - warp * 16);
  if (rows <= 0) return;
  if constexpr (Keys::kMayBeEmpty) clear_unseeing(sum, tile.query + warp * 16 + lane / 4, tile.length, keys.window);
  uint8_t* const rows_of_warp = smem + At::kQ + warp * 16 * At::kRowBytes;
  const int first_row = tile.first_row + tile.query + warp * 16;
  if constexpr (std::is_same_v<Context, QuantizedBlocks>) {
    store_blocks<kDim>(rows_of_warp, out, sum, rows, context, first_row, head, heads, lane);
  } else {
    store_context<T, kDim>(rows_of_warp, out, sum, rows, context, first_row, head, heads, lane);
  }
}

}  // namespace embert::sm90
