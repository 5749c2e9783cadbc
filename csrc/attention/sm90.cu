// softmax(Q·Kᵀ/√d)·V on Hopper, where there are sequences of over 32 tokens: head sizes 64 and 32, 16-bit types.
//
// A block is one warpgroup. It takes 64 query rows of a (sequence, head) and walks the keys 64 at a time. The tensor
// copy engine brings Q once, and K and V in stages. Both products are wgmma: S = Q·Kᵀ from shared memory, and P·V with
// P in the registers where the softmax left it. So no thread computes an address or loads a matrix. Where at most 32
// keys are left, the last step is half as long. Keys are counted from the sequence's own start: same text, same bits.
//
// What bounds it: at d = 64 likely memory. BERT-base's passages take 65 µs a layer, 2.5 TB/s of Q, K, V and context (a
// copy reaches 2.9); by count the steps take 25. At d = 32 issue slots count too, so what surrounds the steps is short:
// whole strides instead of loops over elements. A block mostly waits for its copies, hence as many blocks on a
// multiprocessor as registers allow.
//
// Scores by relative position (MPNet's) are fetched before the wait for K, and the products add to them. Where there
// are sequences of up to 32 tokens as well, the last blocks take two of them each (short.cuh), which saves a launch.
//
// docs/cuda-notes.md says what attention waits for, docs/experiments.md what was tried.

#include <cmath>
#include <type_traits>

#include "attention/attention.h"
#include "attention/short.cuh"
#include "attention/work_list.cuh"
#include "device/dependent_launch.cuh"
#include "device/tensor_maps.h"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/trap.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"

namespace embert {
namespace {

using namespace hopper;

constexpr int kThreads = 128;
constexpr int kRows = 64;  // of Q, and keys of a step
static_assert(kRows == kAttentionRows, "a block is a tile of the work list");
// Blocks on a multiprocessor, and so registers of a thread: 96 and 80. With one more block they spill.
template <int kDim>
constexpr int kBlocks = kDim == 64 ? 5 : 6;

template <int kDim>
struct Layout {
  static constexpr int kRowBytes = kDim * 2, kChunks = kRowBytes / 16;
  // As many as that many blocks have shared memory for.
  static constexpr int kStages = kDim == 64 ? 2 : 4;
  static constexpr int kTileBytes = kRows * kRowBytes;
  static constexpr int kQ = 0, kK = kTileBytes, kV = kK + kStages * kTileBytes;
  static constexpr int kBarriers = kV + kStages * kTileBytes;  // one a stage; Q arrives at the first stage's
  static constexpr int kSharedBytes = kBarriers + kStages * 8;
  static_assert(short_shared_bytes<half_t, kDim>() <= kSharedBytes, "short sequences fit");
};

template <int kDim>
__device__ __forceinline__ uint64_t rows_operand(uint32_t address) {
  return kDim == 64 ? operand(address) : narrow_operand(address);
}
// The offset at which the copy engine puts a 16-byte chunk of a row.
template <int kDim>
__device__ __forceinline__ uint32_t place_of(int row, int chunk) {
  return kDim == 64 ? swizzled(row, chunk) : row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
}

// A lane's part of a wgmma result, as tiles of 8 columns.
template <int kElements>
__device__ __forceinline__ float (&tiles(float (&elements)[kElements]))[kElements / 4][4] {
  return reinterpret_cast<float(&)[kElements / 4][4]>(elements);
}

template <typename T, int kDim, bool kRelative>
__global__ void __launch_bounds__(kThreads, kBlocks<kDim>)
    attention_hopper_kernel(const __grid_constant__ CUtensorMap qkv_map, const T* qkv, const AttentionWork work,
                            int heads, float scale_log2, T* context, bool backwards, const RelativeScores relative) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using At = Layout<kDim>;
  extern __shared__ __align__(1024) uint8_t raw[];
  const uint32_t base = shared_address(raw), barriers = base + At::kBarriers;
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  // Heads of one tile run side by side: their rows are neighbours in memory.
  const int head = blockIdx.x, index = blockIdx.y;
  if (index >= work.tile_count) {
    const int pair = warp / 2, at = (index - work.tile_count) * kShortPairs + pair;
    const AttentionTile tile = at < work.short_count ? early_tile(work.shorts + at) : AttentionTile{};
    wait_for_earlier_kernels();
    dependents_may_launch();
    if (tile.length > 0)
      attend_short<T, kDim, kRelative>(qkv, tile, head, heads, kDim, scale_log2, relative, context, raw, pair,
                                       threadIdx.x % 64);
    return;
  }
  const AttentionTile tile = early_tile(work.tiles + (backwards ? work.tile_count - 1 - index : index));
  if (warp == 0) {  // this warp fetches; the others need the barriers later
    if (elect_lane()) {
      prefetch_maps(qkv_map);
      for (int stage = 0; stage < At::kStages; ++stage) init_barrier(barriers + 8 * stage, 1);
      fence_barrier_init();
    }
    __syncwarp();
  }
  wait_for_earlier_kernels();
  dependents_may_launch();  // not earlier: gemm/loops/few_rows.cuh
  if (tile.length == 0 || !is_wanted(tile, work.queries, kRows)) return;
  const int steps = (tile.length + kRows - 1) / kRows;
  const auto fetch = [&](int step, bool with_q = false) {  // for an elected lane (ptx/warp.cuh)
    const int stage = step % At::kStages, row = tile.first_row + step * kRows;
    const uint32_t barrier = barriers + 8 * stage;
    arrive_expecting(barrier, (with_q ? 3 : 2) * At::kTileBytes);
    if (with_q) load_box(&qkv_map, base + At::kQ, barrier, head * kDim, tile.first_row + tile.query);
    load_box(&qkv_map, base + At::kK + stage * At::kTileBytes, barrier, (heads + head) * kDim, row);
    load_box(&qkv_map, base + At::kV + stage * At::kTileBytes, barrier, (2 * heads + head) * kDim, row);
  };
  if (warp == 0 && elect_lane()) {
    fetch(0, true);
#pragma unroll
    for (int step = 1; step < At::kStages; ++step) {
      if (step < steps) fetch(step);
    }
  }
  __syncthreads();

  const float* const nearness = kRelative ? first_score(relative, head, tile.query + warp * 16, lane) : nullptr;
  float out[kDim / 2];
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};  // of rows lane / 4 and lane / 4 + 8 of the warp's
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) out[i] = 0.0f;

  const auto attend = [&](int step, auto keys) {
    constexpr int kKeys = decltype(keys)::value;
    const int stage = step % At::kStages;
    const uint32_t k_from = base + At::kK + stage * At::kTileBytes, v_from = base + At::kV + stage * At::kTileBytes;
    const int valid = tile.length - step * kRows;
    float s[kKeys / 2];
    if constexpr (kRelative)  // the products add to these, which are fetched while the copies are in flight
      start_scores<kKeys / 8>(nearness + step * kRows, [&](int n, int i) -> float& { return s[4 * n + i]; });
    wait_barrier(barriers + 8 * stage, step / At::kStages % 2);
    fence_registers();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
      multiply<T>(s, further(rows_operand<kDim>(base + At::kQ), k * 32), further(rows_operand<kDim>(k_from), k * 32),
                  kRelative || k > 0);
    commit_products();
    if (valid < kKeys) {
      // Rows past the sequence's end belong to its neighbour. Their weights are 0, but 0 · infinity is not.
      const int row = threadIdx.x / At::kChunks;
      uint8_t* const place = raw + (v_from - base) + place_of<kDim>(row, threadIdx.x % At::kChunks);
#pragma unroll
      for (int from = kKeys - kRows / 2; from < kKeys; from += kThreads / At::kChunks) {  // those before are all valid
        if (from + row >= valid) *reinterpret_cast<uint4*>(place + from * At::kRowBytes) = uint4{0, 0, 0, 0};
      }
      fence_for_copies();
      __syncthreads();
    }
    finish_products(s);

    if (valid < kKeys) {
      const int left = valid - 2 * (lane % 4);
#pragma unroll
      for (int i = (kKeys - kRows / 2) / 2; i < kKeys / 2; ++i) {
        if (i / 4 * 8 + i % 2 >= left) s[i] = -INFINITY;
      }
    }
    uint32_t p[kKeys / 16][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float correction = soften(tiles(s), half, maximum[half], sum[half], scale_log2);
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
        p[n / 2][2 * (n % 2) + half] = pack_two<T>(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]);
      rescale(tiles(out), half, correction);
    }
    fence_registers();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      multiply_rows<T>(out, p[k], rows_operand<kDim>(v_from + k * 16 * At::kRowBytes), true);
    commit_products();
    finish_products(out);
    if (step + At::kStages < steps) {
      __syncthreads();  // all warps have read this stage
      if (warp == 0 && elect_lane()) fetch(step + At::kStages);
    }
  };
  const bool ends_short = tile.length - (steps - 1) * kRows <= kRows / 2;
  const int whole = ends_short ? steps - 1 : steps;
  for (int step = 0; step < whole; ++step) attend(step, std::integral_constant<int, kRows>());
  if (ends_short) attend(whole, std::integral_constant<int, kRows / 2>());

  // Results pass through Q's memory, which no warp reads any more, so that lanes store 16 bytes of a row.
  __syncthreads();
  const int rows = min(16, tile.length - tile.query - warp * 16);
  if (rows <= 0) return;
  uint8_t* const rows_of_warp = raw + At::kQ + warp * 16 * At::kRowBytes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = sum[half];  // of the lane's columns
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const float inverse = __fdividef(1.0f, total);  // total ≥ 1: the weight of the largest score is 1
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
  T* to = context + (size_t(tile.first_row + tile.query + warp * 16 + row) * heads + head) * kDim + chunk * 8;
#pragma unroll
  for (int i = 0; i < 16; i += kAtOnce) {
    if (row + i < rows)
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(rows_of_warp + i / 8 * 8 * At::kRowBytes +
                                                                      place_of<kDim>(row + i % 8, chunk));
    to += kAtOnce * heads * kDim;
  }
#else
  EMBERT_TRAP("attention_hopper_kernel");
#endif
}

template <typename T, int kDim, bool kRelative>
Status launch_hopper(const void* qkv, int rows, const AttentionWork& work, int heads, const RelativeScores& relative,
                     void* context, TensorMaps& maps, const Stream& stream) {
  const CUtensorMap* map = nullptr;
  EMBERT_TRY(maps.get({qkv, rows, 3 * heads * kDim, kRows, kDim}, map));
  const float scale_log2 = float(1.4426950408889634 / std::sqrt(double(kDim)));
  const dim3 grid(heads, work.tile_count + (work.short_count + kShortPairs - 1) / kShortPairs);
  return launch("attention_hopper", attention_hopper_kernel<T, kDim, kRelative>, grid, kThreads,
                Layout<kDim>::kSharedBytes, stream, *map, static_cast<const T*>(qkv), work, heads, scale_log2,
                static_cast<T*>(context), stream.backwards, relative);
}

}  // namespace

bool attention_sm90_takes(DType dtype, int head_size) {
  return dtype != DType::kFloat32 && (head_size == 32 || head_size == 64);
}

bool attention_sm90_takes_windows() {
  return false;
}

Status attention_sm90(DType dtype, const void* qkv, int rows, const WindowedWork& work, int heads, int head_size,
                        const RelativeScores& relative, void* context, TensorMaps& maps, const Stream& stream) {
  const auto run = [&](auto plain, auto with_relative) {
    return (relative.scores == nullptr ? plain : with_relative)(qkv, rows, work, heads, relative, context, maps,
                                                                stream);
  };
  if (dtype == DType::kFloat16)
    return head_size == 64 ? run(launch_hopper<half_t, 64, false>, launch_hopper<half_t, 64, true>)
                           : run(launch_hopper<half_t, 32, false>, launch_hopper<half_t, 32, true>);
  return head_size == 64 ? run(launch_hopper<bfloat_t, 64, false>, launch_hopper<bfloat_t, 64, true>)
                         : run(launch_hopper<bfloat_t, 32, false>, launch_hopper<bfloat_t, 32, true>);
}

}  // namespace embert
