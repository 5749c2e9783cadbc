// softmax(Q·Kᵀ/√d)·V on Hopper, where there are sequences of over 32 tokens: head sizes 64 and 32, 16-bit types.
//
// A block is one warpgroup. It processes 64 query rows of a (sequence, head) and iterates over the keys 64 at a time.
// TMA loads Q once, and K and V in stages. Both products are wgmma: S = Q·Kᵀ from shared memory, and P·V with P in the
// registers where the softmax left it. So no thread computes an address or loads a matrix. Where at most 32 keys
// remain, the last step is half as long. Keys are counted from the sequence's own start, so results are
// batch-invariant.
//
// The bound: at d = 64 likely memory. BERT-base's passages take 65 µs a layer, 2.5 TB/s of Q, K, V and context (a copy
// reaches 2.9); by count the steps take 25. At d = 32 issue slots count too, so the code around the steps is short:
// whole strides instead of loops over elements. A block mostly waits for its loads, so as many blocks run on a
// multiprocessor as registers allow.
//
// Relative position scores (MPNet's) are loaded before the wait for K, and the products add to them. Where there are
// sequences of up to 32 tokens as well, the last blocks process two of them each (short.cuh), which saves a launch.
//
// docs/cuda-notes.md has a profile of attention, docs/experiments.md the alternatives that were measured.

#include <cmath>

#include "attention/attention.h"
#include "attention/sm90/tile.cuh"
#include "common/launch.cuh"
#include "common/tensor_maps.h"

namespace embert {
namespace {

using namespace sm90;

template <typename T, int kDim, bool kRelative>
__global__ void __launch_bounds__(kTileThreads, kBlocks<kDim>)
    attention_sm90_kernel(const __grid_constant__ CUtensorMap qkv_map, const T* qkv, const AttentionWork work,
                          int heads, float scale_log2, T* context, bool backwards, const RelativeScores relative) {
  EMBERT_SM90A("attention_sm90_kernel", attend_tile<T, kDim, kRelative>(qkv_map, qkv, work, heads, scale_log2, context,
                                                                        backwards, relative, AllKeys{}));
}

// The same with an int8 context.
template <bool kRelative>
__global__ void __launch_bounds__(kTileThreads, kBlocks<kHeadBlock>)
    attention_sm90_blocks_kernel(const __grid_constant__ CUtensorMap qkv_map, const half_t* qkv,
                                 const AttentionWork work, int heads, float scale_log2, const QuantizedBlocks context,
                                 bool backwards, const RelativeScores relative) {
  EMBERT_SM90A("attention_sm90_blocks_kernel",
               attend_tile<half_t, kHeadBlock, kRelative>(qkv_map, qkv, work, heads, scale_log2, context, backwards,
                                                          relative, AllKeys{}));
}

// The same with a window: three steps a tile where it is ± 64, for every text length. So a tile costs as much as one of
// a text of 192 tokens, and reads 56 KB for 8 KB of context. Texts of up to 32 tokens fit into the window.
template <typename T>
__global__ void __launch_bounds__(kTileThreads, kBlocks<64>)
    attention_sm90_window_kernel(const __grid_constant__ CUtensorMap qkv_map, const T* qkv, const AttentionWork work,
                                 int heads, float scale_log2, T* context, bool backwards, int window) {
  EMBERT_SM90A("attention_sm90_window_kernel", attend_tile<T, 64, false>(qkv_map, qkv, work, heads, scale_log2, context,
                                                                         backwards, {}, NearKeys{{window, window}}));
}

template <typename T, int kDim, typename Kernel, typename Context, typename... More>
Status launch_sm90(const char* name, Kernel kernel, const void* qkv, int rows, const AttentionWork& work, int heads,
                   const Context& context, TensorMaps& maps, const Stream& stream, const More&... more) {
  const CUtensorMap* map = nullptr;
  EMBERT_TRY(maps.get({qkv, rows, 3 * heads * kDim, kTileRows, kDim}, map));
  const float scale_log2 = float(1.4426950408889634 / std::sqrt(double(kDim)));
  const dim3 grid(heads, work.tile_count + (work.short_count + kShortPairs - 1) / kShortPairs);
  return launch(name, kernel, grid, kTileThreads, Layout<kDim>::kSharedBytes, stream, *map, static_cast<const T*>(qkv),
                work, heads, scale_log2, context, stream.backwards, more...);
}

template <typename T, int kDim>
Status launch_plain(const void* qkv, int rows, const AttentionWork& work, int heads, const RelativeScores& relative,
                    void* context, TensorMaps& maps, const Stream& stream) {
  const auto kernel =
      relative.scores == nullptr ? attention_sm90_kernel<T, kDim, false> : attention_sm90_kernel<T, kDim, true>;
  return launch_sm90<T, kDim>("attention_sm90", kernel, qkv, rows, work, heads, static_cast<T*>(context), maps, stream,
                              relative);
}

template <typename T>
Status launch_window(const void* qkv, int rows, const WindowedWork& work, int heads, void* context, TensorMaps& maps,
                     const Stream& stream) {
  return launch_sm90<T, 64>("attention_sm90_window", attention_sm90_window_kernel<T>, qkv, rows, work, heads,
                            static_cast<T*>(context), maps, stream, work.window);
}

}  // namespace

bool attention_sm90_supports(DType dtype, int head_size, int window) {
  if (dtype == DType::kFloat32) return false;
  // Short texts are processed without a window, so it must not be narrower than they are.
  return window > 0 ? head_size == 64 && window >= kAttentionShort - 1 : head_size == 32 || head_size == 64;
}

Status attention_sm90(DType dtype, const void* qkv, int rows, const WindowedWork& work, int heads, int head_size,
                      const RelativeScores& relative, void* context, TensorMaps& maps, const Stream& stream) {
  const bool half = dtype == DType::kFloat16;
  if (work.window > 0)
    return (half ? launch_window<half_t> : launch_window<bfloat_t>)(qkv, rows, work, heads, context, maps, stream);
  const auto run = [&](auto launcher) { return launcher(qkv, rows, work, heads, relative, context, maps, stream); };
  if (head_size == 64) return run(half ? launch_plain<half_t, 64> : launch_plain<bfloat_t, 64>);
  return run(half ? launch_plain<half_t, 32> : launch_plain<bfloat_t, 32>);
}

Status attention_sm90_in_blocks(const void* qkv, int rows, const AttentionWork& work, int heads,
                                const RelativeScores& relative, const QuantizedBlocks& context, TensorMaps& maps,
                                const Stream& stream) {
  const auto kernel =
      relative.scores == nullptr ? attention_sm90_blocks_kernel<false> : attention_sm90_blocks_kernel<true>;
  return launch_sm90<half_t, kHeadBlock>("attention_sm90_blocks", kernel, qkv, rows, work, heads, context, maps, stream,
                                         relative);
}

}  // namespace embert
