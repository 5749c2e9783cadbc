// softmax(Q·Kᵀ/√d)·V on Hopper where there are sequences of over 32 tokens: head sizes 64 and 32, 16-bit types.
//
// A block, one warpgroup, takes 64 query rows of a (sequence, head) and walks the keys 64 at a time. The tensor copy
// engine brings Q once, K and V into two stages; both products are wgmma: S = Q·Kᵀ from shared memory, P·V with P in
// the registers that the softmax left it in. So no thread computes an address or loads a matrix. Where 32 keys or fewer
// are left the last step is half as long: passages 45.6 → 43.6 µs a layer at d = 32, 67.9 → 66.9 at d = 64.
//
// By count, a step's 4 096 exps at 16 a cycle take as long as its two products (256 cycles at d = 64). BERT-base's
// passages take 67 µs a layer where the bytes take 54 at 3 TB/s and, by count, the steps 25; what is busiest meanwhile,
// 87 % of the time, is the link between the two halves of the L2 cache. A block mostly waits for its copies, hence as
// many blocks on a multiprocessor as registers allow. Keys are counted from the sequence's own start, whatever its
// neighbours: same text, same bits.
//
// Scores by distance (MPNet's) are fetched before the wait for K, and the products add to them: passages 66.6 → 69.5 µs
// a layer at d = 64, 44.8 → 47.1 at d = 32; 16 × 512 tokens at d = 64 37.0 → 41.5.
//
// Where there are sequences of up to 32 tokens as well, the last blocks take two of them each (attention_short.cuh). A
// launch of their own stood for 11 µs a layer in a profile of BERT-base's passages, of which few are that short.

#include <cmath>
#include <type_traits>

#include "../gemm/hopper.cuh"
#include "../gemm/tensor_maps.h"
#include "attention_short.cuh"
#include "kernels.h"

namespace embert {
namespace {

using namespace hopper;

constexpr int kThreads = 128;
constexpr int kRows = 64;  // of Q, and keys of a step
constexpr int kStages = 2;
static_assert(kRows == kAttentionRows, "a block is a tile of the work list");
// Blocks of a multiprocessor, so registers of a thread: 96 and 80; one more and they would spill. Against four:
// passages 72.5 → 68.4 µs a layer at d = 64, 53.8 → 45.8 at d = 32.
template <int kDim>
constexpr int kBlocks = kDim == 64 ? 5 : 6;

template <int kDim>
struct Layout {
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kTileBytes = kRows * kRowBytes;
  static constexpr int kQ = 0, kK = kTileBytes, kV = kK + kStages * kTileBytes;
  static constexpr int kBarriers = kV + kStages * kTileBytes;  // Q's and first step's, then a stage each
  static constexpr int kSharedBytes = kBarriers + kStages * 8;
  static_assert(short_shared_bytes<half_t, kDim>() <= kSharedBytes, "short sequences have room enough");
};

template <int kDim>
__device__ __forceinline__ uint64_t rows_operand(uint32_t address) {
  return kDim == 64 ? operand(address) : narrow_operand(address);
}
// Where the copy engine puts 16-byte chunk c of row r.
template <int kDim>
__device__ __forceinline__ uint32_t place_of(int row, int chunk) {
  return kDim == 64 ? swizzled(row, chunk) : row * 64 + ((chunk ^ (row / 2 & 3)) << 4);
}

// A lane's part of a result of wgmma, 8 columns a tile.
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
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) init_barrier(barriers + 8 * stage, 1);
    fence_barrier_init();
    prefetch_maps(qkv_map);
  }
  __syncthreads();
  // Heads of one tile run side by side: their rows share pages and cache lines' neighbours.
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
  wait_for_earlier_kernels();
  dependents_may_launch();  // not earlier: gemm/hopper_few.cuh
  if (tile.length == 0 || !is_wanted(tile, work.queries, kRows)) return;
  const int steps = (tile.length + kRows - 1) / kRows;
  const auto fetch = [&](int step) {  // by an elected lane (hopper.cuh); Q comes with the first step
    const int stage = step % kStages, row = tile.first_row + step * kRows;
    const uint32_t barrier = barriers + 8 * stage;
    arrive_expecting(barrier, (step == 0 ? 3 : 2) * At::kTileBytes);
    if (step == 0) load_box(&qkv_map, base + At::kQ, barrier, head * kDim, tile.first_row + tile.query);
    load_box(&qkv_map, base + At::kK + stage * At::kTileBytes, barrier, (heads + head) * kDim, row);
    load_box(&qkv_map, base + At::kV + stage * At::kTileBytes, barrier, (2 * heads + head) * kDim, row);
  };
  if (warp == 0 && elect_lane()) {
    for (int step = 0; step < min(steps, kStages); ++step) fetch(step);
  }

  const float* const nearness = kRelative ? first_score(relative, head, tile.query + warp * 16, lane) : nullptr;
  float out[kDim / 2];
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};  // of rows lane / 4 and lane / 4 + 8 of the warp's
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) out[i] = 0.0f;

  const auto attend = [&](int step, auto keys) {
    constexpr int kKeys = decltype(keys)::value;
    const int stage = step % kStages;
    const uint32_t k_from = base + At::kK + stage * At::kTileBytes, v_from = base + At::kV + stage * At::kTileBytes;
    const int valid = tile.length - step * kRows;
    float s[kKeys / 2];
    if constexpr (kRelative)  // as the products' sums begin, fetched while the copies are still on their way
      start_scores<kKeys / 8>(nearness + step * kRows, [&](int n, int i) -> float& { return s[4 * n + i]; });
    wait_barrier(barriers + 8 * stage, step / kStages % 2);
    fence_registers();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
      multiply<T>(s, further(rows_operand<kDim>(base + At::kQ), k * 32), further(rows_operand<kDim>(k_from), k * 32),
                  kRelative || k > 0);
    commit_products();
    if (valid < kKeys) {
      // The rows after the sequence's end are a neighbour's. Their weights are 0, but 0 · infinity would not be.
      constexpr int kChunks = At::kRowBytes / 16;
      for (int i = valid * kChunks + threadIdx.x; i < kKeys * kChunks; i += kThreads)
        *reinterpret_cast<uint4*>(raw + (v_from - base) + place_of<kDim>(i / kChunks, i % kChunks)) = uint4{0, 0, 0, 0};
      fence_for_copies();
      __syncthreads();
    }
    wait_products<0>();

    if (valid < kKeys) {
      const int column = 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        if (i / 4 * 8 + column + i % 2 >= valid) s[i] = -INFINITY;
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
    wait_products<0>();
    if (step + kStages < steps) {
      __syncthreads();  // everyone is done with this stage
      if (warp == 0 && elect_lane()) fetch(step + kStages);
    }
  };
  const bool ends_short = tile.length - (steps - 1) * kRows <= kRows / 2;
  const int whole = ends_short ? steps - 1 : steps;
  for (int step = 0; step < whole; ++step) attend(step, std::integral_constant<int, kRows>());
  if (ends_short) attend(whole, std::integral_constant<int, kRows / 2>());

  // Through Q's place, which all warps have read for the last time, to whole rows of 16-byte packs.
  __syncthreads();
  const int rows = min(16, tile.length - tile.query - warp * 16);
  if (rows <= 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = sum[half];  // each lane summed its own columns
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const float inverse = 1.0f / total;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const int row = warp * 16 + lane / 4 + 8 * half;
      *reinterpret_cast<uint32_t*>(raw + At::kQ + place_of<kDim>(row, n) + lane % 4 * 4) =
          pack_two<T>(out[4 * n + 2 * half] * inverse, out[4 * n + 2 * half + 1] * inverse);
    }
  }
  __syncwarp();
  constexpr int kChunks = At::kRowBytes / 16;
  T* const to = context + (size_t(tile.first_row) + tile.query + warp * 16) * heads * kDim + head * kDim;
  for (int i = lane; i < rows * kChunks; i += 32) {
    *reinterpret_cast<uint4*>(to + size_t(i / kChunks) * heads * kDim + i % kChunks * 8) =
        *reinterpret_cast<const uint4*>(raw + At::kQ + place_of<kDim>(warp * 16 + i / kChunks, i % kChunks));
  }
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

bool attention_hopper_takes(DType dtype, int head_size) {
  return dtype != DType::kFloat32 && (head_size == 32 || head_size == 64);
}

Status attention_hopper(DType dtype, const void* qkv, int rows, const AttentionWork& work, int heads, int head_size,
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
