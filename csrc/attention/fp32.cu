// softmax(Q·Kᵀ/√d)·V in FP32 throughout: for accuracy, not for speed.
//
// A warp computes a query row: one lane per key for the scores, one lane per column for the sums, an online softmax
// over 32 keys a step.

#include <cmath>

#include "attention/attention.h"
#include "attention/warp.cuh"
#include "attention/window.h"
#include "common/launch.cuh"
#include "common/numeric.cuh"

namespace embert {
namespace {

constexpr int kWarps = 8;
constexpr int kKeys = 32;

constexpr float kMaskedScore = -1e30f;  // a score that a window masks: finite, because a step may have no other

// kMaxDim: of heads. With 256 columns keys and values share their memory, because 48 KB do not hold both.
template <int kMaxDim, bool kRelative, bool kWindow, typename Columns, typename Prefixes = NoPrefixes>
__device__ __forceinline__ void attend_queries(const float* qkv, const AttentionTile* tiles, int heads, int dim,
                                               float scale, float* context, const RelativeScores& relative,
                                               const Columns& columns, const KeyWindow& window,
                                               const Prefixes& prefixes = {}) {
  constexpr int kColumns = kMaxDim / 32;  // of a lane
  constexpr bool kBoth = kMaxDim <= 128;
  __shared__ float keys[kKeys][kMaxDim + 1];
  __shared__ float values_beside[kBoth ? kKeys : 1][kMaxDim + 1];
  auto* const values = kBoth ? values_beside : keys;
  __shared__ float queries[kWarps][kMaxDim];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int head = blockIdx.x;
  const AttentionTile tile = tiles[blockIdx.y];
  if (tile.length == 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const size_t pitch = columns.pitch();
  const float* const base = qkv + size_t(tile.first_row) * pitch + head * dim;
  const int last = min(tile.query + kAttentionRows, tile.tokens());
  const TilePrefix prefix = prefixes[blockIdx.y];
  // From the row of position 0 to that of a key; modulo 2^64.
  const auto row_of = [&](int key) -> size_t {
    if (!std::is_same_v<Prefixes, NoPrefixes> && key < prefix.tokens) key += prefix.row - tile.first_row;
    return key;
  };

  for (int first = tile.query; first < last; first += kWarps) {
    const int query = first + warp;
    const bool real = query < last;
    for (int c = lane; c < dim; c += 32) queries[warp][c] = real ? base[query * pitch + c] * scale : 0.0f;
    float highest = -INFINITY, sum = 0.0f;
    float out[kColumns] = {};
    const int end_step = window.end_step(first + kWarps - 1, tile.length, kKeys);
    const int first_key = kWindow ? window.first_step(first, end_step, kKeys) * kKeys : 0;
    const int end = kWindow ? end_step * kKeys : tile.length;
    for (int key = first_key; key < end; key += kKeys) {
      __syncthreads();
      for (int i = threadIdx.x; i < kKeys * dim; i += kWarps * 32) {
        const int row = i / dim, column = i % dim;
        const bool exists = key + row < tile.length;
        const float* const from = base + row_of(exists ? key + row : 0) * pitch + column;
        keys[row][column] = exists ? from[columns.keys(head)] : 0.0f;
        if constexpr (kBoth) values[row][column] = exists ? from[columns.values(head)] : 0.0f;
      }
      __syncthreads();
      float score = 0.0f;
      for (int c = 0; c < dim; ++c) score = fmaf(queries[warp][c], keys[lane][c], score);
      if constexpr (kRelative)  // last: added earlier, it would coarsen the rounding of every sum above
        score = fmaf(scale, __ldg(relative.scores + (2 * head + 1) * relative.reach + key + lane - query), score);
      if (kWindow && window.hides(query, key + lane)) score = kMaskedScore;
      if (key + lane >= tile.length) score = -INFINITY;
      if constexpr (!kBoth) {
        __syncthreads();  // all warps have read the keys
        for (int i = threadIdx.x; i < kKeys * dim; i += kWarps * 32) {
          const int row = key + i / dim;
          values[i / dim][i % dim] =
              row < tile.length ? base[row_of(row) * pitch + columns.values(head) + i % dim] : 0.0f;
        }
        __syncthreads();
      }
      const float step_highest = fmaxf(highest, warp_max(score));
      const float correction = expf(highest - step_highest);  // 0 at the first step
      const float p = expf(score - step_highest);
      highest = step_highest;
      sum = fmaf(sum, correction, warp_sum(p));
#pragma unroll
      for (int i = 0; i < kColumns; ++i) out[i] *= correction;
      for (int k = 0; k < kKeys; ++k) {
        const float weight = __shfl_sync(~0u, p, k);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          if (lane + 32 * i < dim) out[i] = fmaf(weight, values[k][lane + 32 * i], out[i]);
        }
      }
    }
    if (real) {
      if (kWindow && !window.sees_any(query, tile.length)) sum = INFINITY;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (lane + 32 * i < dim) {
          context[size_t(tile.first_row + query) * heads * dim + head * dim + lane + 32 * i] = out[i] / sum;
        }
      }
    }
  }
}

template <bool kRelative>
__global__ void __launch_bounds__(kWarps * 32)
    attention_fp32_kernel(const float* qkv, const AttentionTile* tiles, int heads, int dim, float scale, float* context,
                          const RelativeScores relative) {
  attend_queries<128, kRelative, false>(qkv, tiles, heads, dim, scale, context, relative, OwnKeys{heads, dim}, {});
}
template <typename Prefixes>
__global__ void __launch_bounds__(kWarps * 32)
    attention_fp32_decoder_kernel(const float* qkv, const AttentionTile* tiles, SharedKeys columns, float scale,
                                  float* context, KeyWindow window, Prefixes prefixes) {
  attend_queries<256, false, true>(qkv, tiles, columns.heads, columns.dim, scale, context, {}, columns, window,
                                   prefixes);
}

}  // namespace

Status attention_fp32(const void* qkv, const AttentionWork& work, int heads, int head_size,
                      const RelativeScores& relative, void* context, const Stream& stream) {
  const float scale = float(1.0 / std::sqrt(double(head_size)));
  const auto run = [&](const AttentionTile* tiles, int count) {
    const auto kernel = relative.scores == nullptr ? attention_fp32_kernel<false> : attention_fp32_kernel<true>;
    return launch("attention_fp32", kernel, dim3(heads, count), kWarps * 32, 0, stream, static_cast<const float*>(qkv),
                  tiles, heads, head_size, scale, static_cast<float*>(context), relative);
  };
  if (work.tile_count > 0) EMBERT_TRY(run(work.tiles, work.tile_count));
  if (work.short_count > 0) EMBERT_TRY(run(work.shorts, work.short_count));
  return {};
}

Status attention_fp32_decoder(const void* qkv, const WindowedWork& work, const AttentionHeads& shape, void* context,
                              const Stream& stream) {
  const SharedKeys columns{shape.heads, shape.kv_heads, shape.heads / shape.kv_heads, shape.head_size};
  const auto run = [&](const char* name, const AttentionTile* tiles, int count, auto prefixes) {
    if (count == 0) return Status();
    return launch(name, attention_fp32_decoder_kernel<decltype(prefixes)>, dim3(shape.heads, count), kWarps * 32, 0,
                  stream, static_cast<const float*>(qkv), tiles, columns, float(scale_of(shape)),
                  static_cast<float*>(context), window_of(work.window, shape.causal), prefixes);
  };
  EMBERT_TRY(work.prefixes == nullptr
                 ? run("attention_fp32_decoder", work.tiles, work.tile_count, NoPrefixes())
                 : run("attention_fp32_prefix", work.tiles, work.tile_count, SharedPrefixes{work.prefixes}));
  return run("attention_fp32_decoder", work.shorts, work.short_count, NoPrefixes());
}

}  // namespace embert
