// softmax(Q·Kᵀ/√d)·V within each sequence of a packed batch, for 16-bit storage; sm_80 and later. Windows are
// sm80_decoder.cu's.
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
#include "ops/attention_work.h"

namespace embert {

namespace {

// 128 registers a thread: four blocks a multiprocessor, where shared memory allows them.
template <typename T, int kDim, bool kRelative>
__global__ void __launch_bounds__(kTileThreads, kDim <= 64 ? 4 : 2)
    attention_sm80_kernel(const T* qkv, const AttentionTile* tiles, int heads, int dim, float scale_log2, T* context,
                          Queries queries, const RelativeScores relative) {
  attend_tile<T, kDim, kRelative, false>(qkv, tiles, blockIdx.y, scale_log2, context, queries, relative,
                                         OwnKeys{heads, dim}, {});
}

template <typename T, int kDim, bool kRelative>
__global__ void __launch_bounds__(kTileThreads)
    attention_sm80_short_kernel(const T* qkv, const AttentionTile* shorts, int heads, int dim, float scale_log2,
                                T* context, const RelativeScores relative) {
  static_assert(kTileThreads == kShortPairs * 64, "a pair of warps a head");
  attend_shorts<T, kDim, kRelative, false>(qkv, shorts, scale_log2, relative, context, OwnKeys{heads, dim}, {});
}

// One block per tile and head, and one per short text and two heads.
template <typename T, int kDim, bool kRelative>
Status launch_attention(const void* qkv, const AttentionWork& work, int heads, int dim, const RelativeScores& relative,
                        void* context, const Stream& stream) {
  const float scale_log2 = float(1.4426950408889634 / std::sqrt(double(dim)));
  const auto* const x = static_cast<const T*>(qkv);
  auto* const y = static_cast<T*>(context);
  EMBERT_TRY(launch_work("attention_sm80", attention_sm80_kernel<T, kDim, kRelative>, heads, work.tile_count,
                         tile_shared_bytes<T, kDim>(), stream, x, work.tiles, heads, dim, scale_log2, y, work.queries,
                         relative));
  return launch_work("attention_short", attention_sm80_short_kernel<T, kDim, kRelative>,
                     (heads + kShortPairs - 1) / kShortPairs, work.short_count, short_shared_bytes<T, kDim>(), stream,
                     x, work.shorts, heads, dim, scale_log2, y, relative);
}

}  // namespace

Status attention_sm80(DType dtype, const void* qkv, const AttentionWork& work, int heads, int head_size,
                      const RelativeScores& relative, void* context, const Stream& stream) {
  return with_half_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const auto run = [&](auto is_relative) {
      const auto go = [&](auto launcher) { return launcher(qkv, work, heads, head_size, relative, context, stream); };
      if (head_size <= 32) return go(launch_attention<T, 32, is_relative>);
      if (head_size <= 64) return go(launch_attention<T, 64, is_relative>);
      if (head_size <= 96) return go(launch_attention<T, 96, is_relative>);
      return go(launch_attention<T, 128, is_relative>);
    };
    return relative.scores == nullptr ? run(std::false_type()) : run(std::true_type());
  });
}

}  // namespace embert
