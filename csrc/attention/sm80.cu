// softmax(Q·Kᵀ/√d)·V within each sequence of a packed batch, for 16-bit storage; sm_80 and later.
//
// There are two kernels. Only a sequence's own length selects between them, so results are batch-invariant:
//   - up to 32 tokens: short.cuh.
//   - more: tile.cuh. On Hopper sm90.cu does this for head sizes 32 and 64, together with the short sequences.
//
// Floor for BERT-base and 26 692 tokens: qkv read and context written, 164 MB, 55 µs at 3 TB/s; 10.7 GFLOP at a mean
// length of 104.

#include <cmath>

#include "attention/attention.h"
#include "attention/short.cuh"
#include "attention/tile.cuh"
#include "common/launch.cuh"
#include "ops/attention_work.h"

namespace embert {

namespace {

// 128 registers a thread: four blocks a multiprocessor, where shared memory allows them.
template <typename T, int kDim, bool kRelative>
__global__ void __launch_bounds__(kTileThreads, kDim <= 64 ? 4 : 2)
    attention_sm80_kernel(const T* qkv, const AttentionTile* tiles, int heads, int dim, float scale_log2, T* context,
                          Queries queries, const RelativeScores relative) {
  attend_tile<T, kDim, kRelative, false>(qkv, tiles, blockIdx.y, heads, dim, scale_log2, context, queries, relative,
                                         OwnKeys{heads, dim}, {});
}
template <typename T, int kDim>
__global__ void __launch_bounds__(kTileThreads, kDim <= 64 ? 4 : 2)
    attention_sm80_window_kernel(const T* qkv, const AttentionTile* tiles, int heads, int dim, float scale_log2,
                                 T* context, Queries queries, int window) {
  attend_tile<T, kDim, false, true>(qkv, tiles, blockIdx.y, heads, dim, scale_log2, context, queries, {},
                                    OwnKeys{heads, dim}, {window, window});
}

template <typename T, int kDim, bool kRelative>
__global__ void __launch_bounds__(kTileThreads)
    attention_sm80_short_kernel(const T* qkv, const AttentionTile* shorts, int heads, int dim, float scale_log2,
                                T* context, const RelativeScores relative) {
  static_assert(kTileThreads == kShortPairs * 64, "a pair of warps a head");
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  const int pair = threadIdx.x / 64, head = blockIdx.x * kShortPairs + pair;
  const AttentionTile tile = early_tile(shorts + blockIdx.y);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // not earlier: gemm/kernels/small_m.cuh
  if (tile.length == 0 || head >= heads) return;
  attend_short<T, kDim, kRelative>(qkv, tile, head, heads, dim, scale_log2, relative, context, shared_bytes, pair,
                                   threadIdx.x % 64, OwnKeys{heads, dim});
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kTileThreads)
    attention_sm80_short_window_kernel(const T* qkv, const AttentionTile* shorts, int heads, int dim, float scale_log2,
                                       T* context, int window) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  const int pair = threadIdx.x / 64, head = blockIdx.x * kShortPairs + pair;
  const AttentionTile tile = early_tile(shorts + blockIdx.y);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (tile.length == 0 || head >= heads) return;
  attend_short<T, kDim, false, true>(qkv, tile, head, heads, dim, scale_log2, {}, context, shared_bytes, pair,
                                     threadIdx.x % 64, OwnKeys{heads, dim}, {window, window});
}

// One block per tile and head.
template <typename T, int kDim, typename Kernel, typename... Rest>
Status launch_tiles(const char* name, Kernel kernel, const void* qkv, const WindowedWork& work, int heads, int dim,
                    float scale_log2, void* context, const Stream& stream, Rest... rest) {
  if (work.tile_count == 0) return {};
  constexpr size_t kBytes = tile_shared_bytes<T, kDim>();
  if (kBytes > 48 * 1024)
    EMBERT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  return launch(name, kernel, dim3(heads, work.tile_count), kTileThreads, kBytes, stream, static_cast<const T*>(qkv),
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
  return launch(name, kernel, dim3((heads + kShortPairs - 1) / kShortPairs, work.short_count), kTileThreads, kBytes,
                stream, static_cast<const T*>(qkv), work.shorts, heads, dim, scale_log2, static_cast<T*>(context),
                last);
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
