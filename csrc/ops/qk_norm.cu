// RMSNorms of each head's queries and keys, and RoPE, in place: one pass over columns that QKV has written. Values may
// be normalized, too, without a gamma.
//
// A block has one row, or with few rows some heads of one. Its groups of lanes take heads in turn, so that a lane keeps
// the (cos, sin) of its columns for all of them. Floor for 26 361 rows of 24 heads of 128, FP16: 162 MB read and as
// many written, 108 µs at 3 TB/s; measured 130 (H100).

#include <type_traits>

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "ops/elementwise.h"

namespace embert {
namespace {

constexpr int kThreads = 128, kMaxHeadSize = 512;

constexpr int kFewRows = 256;  // up to which a group has one head: latency counts

// kLanes: of a head, with kPacks packs each: lane, lane + kLanes, … kValues: the heads from `first_value` on are
// values.
template <typename T, int kLanes, int kPacks, bool kValues>
__global__ void __launch_bounds__(kThreads)
    qk_norm_rope_kernel(T* x, int pitch, int heads, const HeadNorms norms, const RopeColumns rope, int first_value) {
  constexpr int kWidth = Pack<T>::kSize, kGroups = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes, head_size = rope.head_size;
  const auto column_of = [&](int pack) { return (pack * kLanes + lane) * kWidth; };  // of a head
  const int half = rope.rotary_dim / 2;
  T* const row = x + size_t(blockIdx.x) * pitch;
  Pack<T> packs[kPacks];
  const auto load = [&](int head) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (head < heads && column_of(p) < head_size)
        packs[p] = load_pack_coherent(row + head * head_size + column_of(p));
    }
  };
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  int head = blockIdx.y * kGroups + group;
  load(head);  // in flight with the position
  float2 cos_sin[kPacks][kWidth / 2];
  // Written by this batch's first kernel: not through the read-only path.
  const float2* const angles = half == 0 ? nullptr : rope.table + size_t(*(rope.positions + blockIdx.x)) * half;
#pragma unroll
  for (int p = 0; p < kPacks; ++p)
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      const int j = column_of(p) / 2 + i;
      cos_sin[p][i] = j < half ? __ldg(angles + j) : float2{1.0f, 0.0f};
    }
  // All lanes of a warp take part in each shuffle, also those of a head past the last one.
  for (int first = blockIdx.y * kGroups; first < heads; first += gridDim.y * kGroups) {
    float squares = 0.0f;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (head >= heads || column_of(p) >= head_size) continue;
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float value = to_float(packs[p].values[i]);
        squares = fmaf(value, value, squares);
      }
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step >>= 1) squares += __shfl_xor_sync(~0u, squares, step);
    const float scale = rsqrtf(squares / head_size + norms.epsilon);
    const float* const gamma = head < norms.heads ? norms.query : norms.key;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (head >= heads || column_of(p) >= head_size) continue;
#pragma unroll
      for (int i = 0; i < kWidth; i += 4) {
        Pack<float> four = load_pack(gamma + column_of(p) + i);
        if constexpr (kValues) {
          if (head >= first_value) four = {{1.0f, 1.0f, 1.0f, 1.0f}};
        }
#pragma unroll
        for (int k = 0; k < 4; k += 2) {
          const float a = to_float(packs[p].values[i + k]) * scale * four.values[k];
          const float b = to_float(packs[p].values[i + k + 1]) * scale * four.values[k + 1];
          float2 by = cos_sin[p][(i + k) / 2];
          if constexpr (kValues) {
            if (head >= first_value) by = {1.0f, 0.0f};
          }
          packs[p].values[i + k] = from_float<T>(a * by.x - b * by.y);
          packs[p].values[i + k + 1] = from_float<T>(b * by.x + a * by.y);
        }
      }
      store_pack(row + head * head_size + column_of(p), packs[p]);
    }
    head += gridDim.y * kGroups;
    load(head);
  }
}

}  // namespace

bool qk_norm_supports(DType dtype, int head_size) {
  return head_size > 0 && head_size <= kMaxHeadSize && head_size % (16 / bytes_of(dtype)) == 0;
}

Status qk_norm_rope(DType dtype, void* x, int rows, int pitch, const HeadNorms& norms, const RopeColumns& rope,
                    int values, const Stream& stream) {
  if (!qk_norm_supports(dtype, rope.head_size) || rope.columns % rope.head_size != 0 || values < 0 ||
      rope.columns + values * rope.head_size > pitch || pitch % (16 / bytes_of(dtype)) != 0 ||
      rope.rotary_dim % 2 != 0 || rope.rotary_dim > rope.head_size)
    return Status::refused("qk_norm: ", rope.rotary_dim, " columns of heads of ", rope.head_size, " in rows of ",
                           pitch);
  const int first_value = rope.columns / rope.head_size, heads = first_value + values;
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const int packs = rope.head_size / Pack<T>::kSize;
    const auto run = [&](auto lanes, auto packs_of_lane) {
      const int groups = kThreads / lanes, across = rows <= kFewRows ? (heads + groups - 1) / groups : 1;
      const auto kernel = values > 0 ? qk_norm_rope_kernel<T, lanes, packs_of_lane, true>
                                     : qk_norm_rope_kernel<T, lanes, packs_of_lane, false>;
      return launch("qk_norm", kernel, dim3(rows, across), kThreads, 0, stream, static_cast<T*>(x), pitch, heads, norms,
                    rope, first_value);
    };
    constexpr std::integral_constant<int, 1> kOne{};
    if (packs <= 4) return run(std::integral_constant<int, 4>(), kOne);
    if (packs <= 8) return run(std::integral_constant<int, 8>(), kOne);
    if (packs <= 16) return run(std::integral_constant<int, 16>(), kOne);
    if (packs <= 32) return run(std::integral_constant<int, 32>(), kOne);
    if constexpr (std::is_same_v<T, float>) {
      if (packs > 64) return run(std::integral_constant<int, 32>(), std::integral_constant<int, 4>());
    }
    return run(std::integral_constant<int, 32>(), std::integral_constant<int, 2>());
  });
}

}  // namespace embert
