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
#include "common/launch.cuh"
#include "ops/attention_work.h"

namespace embert {
namespace {

template <int kDim>
constexpr int kBlocks = kDim == 64    ? 4
                        : kDim == 128 ? 2
                                      : 1;  // on a multiprocessor

template <typename T, int kDim>
__global__ void __launch_bounds__(kTileThreads, kBlocks<kDim>)
    attention_sm80_decoder_kernel(const T* qkv, const AttentionTile* tiles, SharedKeys columns, float scale_log2,
                                  T* context, Queries queries, KeyWindow window) {
  attend_tile<T, kDim, false, true>(qkv, tiles, gridDim.y - 1 - blockIdx.y, columns.heads, columns.dim, scale_log2,
                                    context, queries, {}, columns, window);
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kTileThreads)
    attention_sm80_decoder_short_kernel(const T* qkv, const AttentionTile* shorts, SharedKeys columns, float scale_log2,
                                        T* context, KeyWindow window) {
  static_assert(kTileThreads == kShortPairs * 64, "a pair of warps a head");
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  const int pair = threadIdx.x / 64, head = blockIdx.x * kShortPairs + pair;
  const AttentionTile tile = early_tile(shorts + blockIdx.y);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // not earlier: gemm/kernels/small_m.cuh
  if (tile.length == 0 || head >= columns.heads) return;
  attend_short<T, kDim, false, true>(qkv, tile, head, columns.heads, columns.dim, scale_log2, {}, context, shared_bytes,
                                     pair, threadIdx.x % 64, columns, window);
}

template <typename T, int kDim>
Status launch_decoder(const void* qkv, const WindowedWork& work, const AttentionHeads& shape, void* context,
                      const Stream& stream) {
  const SharedKeys columns{shape.heads, shape.kv_heads, shape.heads / shape.kv_heads, shape.head_size};
  const KeyWindow window = window_of(work.window, shape.causal);
  const float scale_log2 = float(1.4426950408889634 * scale_of(shape));
  const auto run = [&](const char* name, auto kernel, int blocks, int count, size_t bytes, const AttentionTile* tiles,
                       const auto&... more) -> Status {
    if (count == 0) return {};
    if (bytes > 48 * 1024)
      EMBERT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
    return launch(name, kernel, dim3(blocks, count), kTileThreads, bytes, stream, static_cast<const T*>(qkv), tiles,
                  columns, scale_log2, static_cast<T*>(context), more...);
  };
  EMBERT_TRY(run("attention_sm80_decoder", attention_sm80_decoder_kernel<T, kDim>, shape.heads, work.tile_count,
                 tile_shared_bytes<T, kDim>(), work.tiles, work.queries, window));
  return run("attention_decoder_short", attention_sm80_decoder_short_kernel<T, kDim>,
             (shape.heads + kShortPairs - 1) / kShortPairs, work.short_count, short_shared_bytes<T, kDim>(),
             work.shorts, window);
}

}  // namespace

Status attention_sm80_decoder(DType dtype, const void* qkv, const WindowedWork& work, const AttentionHeads& shape,
                              void* context, const Stream& stream) {
  const auto run = [&](auto of_64, auto of_128, auto of_256) {
    const auto launcher = shape.head_size <= 64 ? of_64 : shape.head_size <= 128 ? of_128 : of_256;
    return launcher(qkv, work, shape, context, stream);
  };
  if (dtype == DType::kFloat16)
    return run(launch_decoder<half_t, 64>, launch_decoder<half_t, 128>, launch_decoder<half_t, 256>);
  return run(launch_decoder<bfloat_t, 64>, launch_decoder<bfloat_t, 128>, launch_decoder<bfloat_t, 256>);
}

}  // namespace embert
