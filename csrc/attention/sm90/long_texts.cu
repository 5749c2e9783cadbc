// softmax(Q·Kᵀ/√d)·V of long texts on Hopper: tiles of 128 queries, head size 64, 16-bit types.
//
// Two warpgroups have 64 queries each and share K and V, which come through a pipeline of four steps of 64 keys. A
// block covers two entries of the work list; the second entry's own block exits immediately. Everything else is a step
// of sm90.cu: the same wgmma shapes, the same softmax, keys in the same order. So the bits are the same, and the choice
// between the two kernels may depend on the batch.
//
// By count, 16 texts of 8 192 tokens with 12 heads, a layer on an H100 (132 multiprocessors at 1.755 GHz):
//   products            3.3 TFLOP          3.3 ms at 989 TFLOP/s
//   exponentials        12.9 · 10⁹         3.5 ms at 16 a cycle and multiprocessor
//   K and V from L2     25.8 GB            4.7 ms at 5.5 TB/s; 9.4 ms in tiles of 64 queries
//   Q, K, V, context    0.8 GB of memory   0.3 ms
// A tile and step are 16 KB and 2.1 MFLOP. 400 TFLOP/s are 8.2 ms, so tiles of 64 queries cannot reach them.
//
// Products and exponentials of one warpgroup do not overlap. So four warpgroups share a multiprocessor, two per block;
// no two of them wait for each other in a step, unless one is three steps ahead.

#include <cmath>

#include "attention/attention.h"
#include "attention/sm90/tile.cuh"
#include "common/launch.cuh"
#include "common/tensor_maps.h"

namespace embert {
namespace sm90 {

struct LongLayout {
  static constexpr int kDim = 64;
  static constexpr int kGroups = 2, kThreads = kGroups * kTileThreads;
  static constexpr int kStages = 4;
  static constexpr int kTileBytes = Layout<kDim>::kTileBytes;
  static constexpr int kQ = 0, kK = kGroups * kTileBytes, kV = kK + kStages * kTileBytes;
  static constexpr int kFull = kV + kStages * kTileBytes;  // mbarriers; Q arrives at that of the first stage
  static constexpr int kEmpty = kFull + kStages * 8;
  static constexpr int kSharedBytes = kEmpty + kStages * 8;
  static_assert(2 * (kSharedBytes + 1024) <= 228 * 1024, "two blocks on a multiprocessor");
};

}  // namespace sm90

namespace {

using namespace sm90;

template <typename T>
__global__ void __launch_bounds__(LongLayout::kThreads, 2)
    attention_sm90_long_kernel(const __grid_constant__ CUtensorMap qkv_map, const AttentionWork work, int heads,
                               float scale_log2, T* context, bool backwards) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using At = LongLayout;
  constexpr int kDim = At::kDim;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t base = shared_address(smem), full = base + At::kFull, empty = base + At::kEmpty;
  const int group = warp_index() / 4, warp = warp_index() % 4, lane = threadIdx.x % 32;
  const int head = blockIdx.x, index = blockIdx.y;
  const AttentionTile tile = early_tile(work.tiles + (backwards ? work.tile_count - 1 - index : index));
  const int query = tile.query + group * kTileRows;                 // of the warpgroup
  const int groups = tile.query + kTileRows < tile.length ? 2 : 1;  // warpgroups with queries
  if (threadIdx.x == 0) {
    prefetch_tensor_maps(qkv_map);
    for (int stage = 0; stage < At::kStages; ++stage) {
      mbarrier_init(full + 8 * stage, 1);
      mbarrier_init(empty + 8 * stage, 4 * groups);
    }
    fence_mbarrier_init();
  }
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();                                // not earlier: gemm/kernels/small_m.cuh
  const bool is_second = tile.query / kTileRows % At::kGroups != 0;  // second of the two entries
  if (tile.length == 0 || is_second || !is_needed(tile, work.queries, At::kGroups * kTileRows)) return;
  __syncthreads();
  if (group >= groups) return;

  const int steps = (tile.length + kTileRows - 1) / kTileRows;
  const auto fetch = [&](int step) {  // for an elected lane (common/warp.cuh)
    const int stage = step % At::kStages, row = tile.first_row + step * kTileRows;
    const uint32_t barrier = full + 8 * stage;
    mbarrier_arrive_expect_tx(barrier, (step == 0 ? 2 + groups : 2) * At::kTileBytes);
    for (int i = 0; step == 0 && i < groups; ++i)
      tma_load(&qkv_map, base + At::kQ + i * At::kTileBytes, barrier, head * kDim,
               tile.first_row + tile.query + i * kTileRows);
    tma_load(&qkv_map, base + At::kK + stage * At::kTileBytes, barrier, (heads + head) * kDim, row);
    tma_load(&qkv_map, base + At::kV + stage * At::kTileBytes, barrier, (2 * heads + head) * kDim, row);
  };
  const bool fetches = group == 0 && warp == 0;
  if (fetches && elect_one()) {
    for (int step = 0; step < min(steps, At::kStages); ++step) fetch(step);
  }
  __syncwarp();

  const uint32_t consumer_q = base + At::kQ + group * At::kTileBytes;
  float out[kDim / 2];
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};  // of rows lane / 4 and lane / 4 + 8 of the warp's
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) out[i] = 0.0f;

  const auto attend = [&](int step, auto count) {
    constexpr int kKeys = decltype(count)::value;
    const int stage = step % At::kStages;
    const uint32_t k_from = base + At::kK + stage * At::kTileBytes, v_from = base + At::kV + stage * At::kTileBytes;
    const int valid = tile.length - step * kTileRows;
    float s[kKeys / 2];
    mbarrier_wait(full + 8 * stage, step / At::kStages % 2);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
      wgmma<T>(s, advance_descriptor(make_descriptor(consumer_q), k * 32),
               advance_descriptor(make_descriptor(k_from), k * 32), k > 0);
    wgmma_commit();
    if (valid < kKeys) {
      // The same rule as in tile.cuh. Each warpgroup writes the zeros that it reads; the other one writes the same
      // values.
      constexpr int kChunks = Layout<kDim>::kChunks;
      const int thread = threadIdx.x % kTileThreads, row = thread / kChunks;
      uint8_t* const place = smem + (v_from - base) + place_of<kDim>(row, thread % kChunks);
#pragma unroll
      for (int from = kKeys - kTileRows / 2; from < kKeys; from += kTileThreads / kChunks) {
        if (from + row >= valid) *reinterpret_cast<uint4*>(place + from * Layout<kDim>::kRowBytes) = uint4{0, 0, 0, 0};
      }
      fence_async_proxy();
      sync_group(group);
    }
    wgmma_wait_all(s);

    AllKeys{}.mask(s, tile, step, warp, lane);
    uint32_t p[kKeys / 16][4];
    softmax_and_scale<T, false>(s, p, out, maximum, sum, scale_log2);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k)
      wgmma_rs_mn_major<T>(out, p[k], make_descriptor(v_from + k * 16 * Layout<kDim>::kRowBytes), true);
    wgmma_commit();
    wgmma_wait_all(out);
    if (lane == 0) mbarrier_arrive(empty + 8 * stage);
    // The stage of the previous step is refilled when both warpgroups have read it, which the other one usually has.
    const int next = step - 1 + At::kStages;
    if (fetches && step > 0 && next < steps) {
      if (elect_one()) {
        mbarrier_wait(empty + 8 * ((step - 1) % At::kStages), (step - 1) / At::kStages % 2);
        fetch(next);
      }
      __syncwarp();
    }
  };
  const bool ends_short = tile.length - (steps - 1) * kTileRows <= kTileRows / 2;
  const int full_steps = ends_short ? steps - 1 : steps;
  for (int step = 0; step < full_steps; ++step) attend(step, std::integral_constant<int, kTileRows>());
  if (ends_short) attend(full_steps, std::integral_constant<int, kTileRows / 2>());

  // Results pass through the warpgroup's part of Q's memory, which only this warpgroup has read.
  sync_group(group);
  const int rows = min(16, tile.length - query - warp * 16);
  if (rows <= 0) return;
  store_context<T, kDim>(smem + At::kQ + group * At::kTileBytes + warp * 16 * Layout<kDim>::kRowBytes, out, sum, rows,
                         context, tile.first_row + query + warp * 16, head, heads, lane);
#else
  EMBERT_TRAP("attention_sm90_long_kernel");
#endif
}

template <typename T>
Status launch_long(const void* qkv, int rows, const WindowedWork& work, int heads, void* context, TensorMaps& maps,
                   const Stream& stream) {
  using At = LongLayout;
  const auto kernel = attention_sm90_long_kernel<T>;
  const CUtensorMap* map = nullptr;
  EMBERT_TRY(maps.get({qkv, rows, 3 * heads * At::kDim, kTileRows, At::kDim}, map));
  EMBERT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, At::kSharedBytes));
  const float scale_log2 = float(1.4426950408889634 / std::sqrt(double(At::kDim)));
  return launch("attention_sm90_long", kernel, dim3(heads, work.tile_count), At::kThreads, At::kSharedBytes, stream,
                *map, static_cast<const AttentionWork&>(work), heads, scale_log2, static_cast<T*>(context),
                stream.backwards);
}

}  // namespace

bool attention_sm90_long_supports(DType dtype, int head_size) {
  return dtype != DType::kFloat32 && head_size == LongLayout::kDim;
}

Status attention_sm90_long(DType dtype, const void* qkv, int rows, const WindowedWork& work, int heads, void* context,
                           TensorMaps& maps, const Stream& stream) {
  return (dtype == DType::kFloat16 ? launch_long<half_t> : launch_long<bfloat_t>)(qkv, rows, work, heads, context, maps,
                                                                                  stream);
}

}  // namespace embert
