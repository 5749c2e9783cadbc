// Attention of decoders for 16-bit storage, on sm_80 and later: grouped heads, causal or with windows, head sizes up to
// 256. The tiles and the choice between two kernels are sm80.cu's.
//
// A tile reads only the steps of keys that one of its queries attends to. The tiles of a text with the most steps start
// first: where attention is causal the last ones, so that the last blocks of a launch are short.
//
// Heads of a group run side by side, so all but the first find their keys and values in the L2 cache. A head size is
// rounded up to 64, 128 or 256 columns. With 256, a thread has 128 sums, 64 registers of queries and 16 scores; steps
// are of 32 keys, and the 99 KB of shared memory are all that an RTX 4090 has.

#include "attention/attention.h"
#include "attention/short.cuh"
#include "attention/tile.cuh"
#include "ops/attention_work.h"

namespace embert {
namespace {

template <int kDim>
constexpr int kBlocks = kDim == 64    ? 4
                        : kDim == 128 ? 2
                                      : 1;  // on a multiprocessor

template <typename T, int kDim, typename Prefixes>
__global__ void __launch_bounds__(kTileThreads, kBlocks<kDim>)
    attention_sm80_decoder_kernel(const T* qkv, const AttentionTile* tiles, SharedKeys columns, float scale_log2,
                                  T* context, Queries queries, KeyWindow window, Prefixes prefixes) {
  attend_tile<T, kDim, false, true>(qkv, tiles, gridDim.y - 1 - blockIdx.y, scale_log2, context, queries, {}, columns,
                                    window, prefixes);
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kTileThreads)
    attention_sm80_decoder_short_kernel(const T* qkv, const AttentionTile* shorts, SharedKeys columns, float scale_log2,
                                        T* context, KeyWindow window) {
  attend_shorts<T, kDim, false, true>(qkv, shorts, scale_log2, {}, context, columns, window);
}

template <typename T, int kDim>
Status launch_decoder(const void* qkv, const WindowedWork& work, const AttentionHeads& shape, void* context,
                      const Stream& stream) {
  const SharedKeys columns{shape.heads, shape.kv_heads, shape.heads / shape.kv_heads, shape.head_size};
  const KeyWindow window = window_of(work.window, shape.causal);
  const float scale_log2 = float(1.4426950408889634 * scale_of(shape));
  const auto* const x = static_cast<const T*>(qkv);
  auto* const y = static_cast<T*>(context);
  const auto run = [&](const char* name, auto prefixes) {
    return launch_work(name, attention_sm80_decoder_kernel<T, kDim, decltype(prefixes)>, shape.heads, work.tile_count,
                       tile_shared_bytes<T, kDim>(), stream, x, work.tiles, columns, scale_log2, y, work.queries,
                       window, prefixes);
  };
  EMBERT_TRY(work.prefixes == nullptr ? run("attention_sm80_decoder", NoPrefixes())
                                      : run("attention_sm80_prefix", SharedPrefixes{work.prefixes}));
  return launch_work("attention_decoder_short", attention_sm80_decoder_short_kernel<T, kDim>,
                     (shape.heads + kShortPairs - 1) / kShortPairs, work.short_count, short_shared_bytes<T, kDim>(),
                     stream, x, work.shorts, columns, scale_log2, y, window);
}

}  // namespace

Status attention_sm80_decoder(DType dtype, const void* qkv, const WindowedWork& work, const AttentionHeads& shape,
                              void* context, const Stream& stream) {
  return with_half_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const auto launcher = shape.head_size <= 64    ? launch_decoder<T, 64>
                          : shape.head_size <= 128 ? launch_decoder<T, 128>
                                                   : launch_decoder<T, 256>;
    return launcher(qkv, work, shape, context, stream);
  });
}

}  // namespace embert
