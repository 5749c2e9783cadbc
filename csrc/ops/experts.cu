// Routes rows to experts, groups them by expert, and adds the experts' outputs.
//
// Floor for 26 692 rows of 768 and 2 of 8 experts, FP16, at 3 TB/s: routing reads x, 41 MB, 14 µs; grouping reads x and
// writes it twice, 123 MB, 41 µs; the sum reads x and two outputs and writes y, 164 MB, 55 µs. The products of the
// experts are 252 GFLOP for each of two matrices of 3 072 · 768. On an H100 all of it takes 1 042 µs, 64 for 16 rows.

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "ops/experts.h"
#include "ops/warp_row.cuh"

namespace embert {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32;
static_assert(kMaxExperts == 32 && kRoutedRows == 32, "a lane each");

// A warp has a row at a time, and a lane an expert.
template <typename T, int kPacks>
__global__ void __launch_bounds__(kThreads)
    route_kernel(const T* x, const float* weight, int rows, int hidden, const RoutedRows routed) {
  __shared__ int counts[kMaxExperts];
  const auto [experts, top_k] = routed.kind;
  const int lane = threadIdx.x % 32, end = min(rows, int(blockIdx.x + 1) * kRoutedRows);
  if (threadIdx.x < kMaxExperts) counts[threadIdx.x] = 0;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  __syncthreads();
  for (int row = blockIdx.x * kRoutedRows + threadIdx.x / 32; row < end; row += kWarps) {
    WarpRow<T, kPacks> values;
    Pack<T> packs[kPacks];
    values.clear();
    load_row(packs, x + size_t(row) * hidden, lane, hidden);
    values.add(packs, lane, hidden);
    float logit = -INFINITY;
    for (int expert = 0; expert < experts; ++expert) {
      float sum = 0.0f;
      values.with_vector(weight + size_t(expert) * hidden, lane, hidden,
                         [&](float element, float other) { sum = fmaf(element, other, sum); });
      sum = warp_sum(sum);
      if (lane == expert) logit = sum;
    }
    const float largest = warp_max(logit), power = lane < experts ? expf(logit - largest) : 0.0f;
    const float share = power / warp_sum(power);
    int rank = 0;  // of equal shares the lower expert's counts
    for (int other = 0; other < experts; ++other) {
      const float other_share = __shfl_sync(~0u, share, other);
      rank += other_share > share || (other_share == share && other < lane) ? 1 : 0;
    }
    // With NaN all ranks are 0: the first experts are as good as any.
    const unsigned selected = __ballot_sync(~0u, lane < experts && rank < top_k);
    const int index = __popc(selected & ((1u << lane) - 1));
    if ((selected >> lane & 1) == 0 || index >= top_k) continue;
    routed.routes[size_t(row) * top_k + index] = {lane, share};
    routed.slots[size_t(row) * top_k + index] = lane * rows + row;
    atomicAdd(&counts[lane], 1);
  }
  __syncthreads();
  if (int(threadIdx.x) < experts) routed.counts[blockIdx.x * experts + threadIdx.x] = counts[threadIdx.x];
}

// A block has the rows that a block of route_kernel has counted.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    group_kernel(const T* x, int rows, int hidden, int max_tiles, const RoutedRows routed, T* y) {
  constexpr int kWidth = Pack<T>::kSize;
  __shared__ int earlier[kWarps][kMaxExperts], all[kWarps][kMaxExperts];  // rows of each expert
  __shared__ int first_tile[kMaxExperts + 1];
  __shared__ int slots[kRoutedRows * kMaxExperts];
  const auto [experts, top_k] = routed.kind;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_row = blockIdx.x * kRoutedRows;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  int before = 0, total = 0;
  for (int block = warp; block < int(gridDim.x) && lane < experts; block += kWarps) {
    const int count = *(routed.counts + block * experts + lane);
    total += count;
    if (block < int(blockIdx.x)) before += count;
  }
  earlier[warp][lane] = before, all[warp][lane] = total;
  __syncthreads();
  if (warp == 0) {
    before = total = 0;
    for (int i = 0; i < kWarps; ++i) before += earlier[i][lane], total += all[i][lane];
    const int tile_count = (total + kExpertTile - 1) / kExpertTile;
    int inclusive = tile_count;
    for (int step = 1; step < 32; step <<= 1) {
      const int other = __shfl_up_sync(~0u, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    first_tile[lane + 1] = inclusive;
    if (lane == 0) first_tile[0] = 0;
    const int next =
        (inclusive - tile_count) * kExpertTile + before;  // the slot of this block's first row of the expert
    // From here on a lane has a row.
    unsigned row_experts = 0;
    for (int i = 0; i < top_k && first_row + lane < rows; ++i)
      row_experts |= 1u << (routed.routes + size_t(first_row + lane) * top_k + i)->expert;
    for (int expert = 0; expert < experts; ++expert) {
      const unsigned rows_of = __ballot_sync(~0u, (row_experts >> expert & 1) != 0);
      const int slot = __shfl_sync(~0u, next, expert) + __popc(rows_of & ((1u << lane) - 1));
      if ((row_experts >> expert & 1) == 0) continue;
      const int i = lane * top_k + __popc(row_experts & ((1u << expert) - 1));
      slots[i] = slot;
      routed.slots[size_t(first_row) * top_k + i] = slot;
    }
  }
  __syncthreads();
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) routed.tiles[0] = first_tile[experts];
    for (int tile = threadIdx.x; tile < max_tiles; tile += kThreads) {
      int expert = 0;
      while (expert < experts - 1 && first_tile[expert + 1] <= tile) ++expert;
      routed.tiles[1 + tile] = expert;
    }
  }
  const int packs = hidden / kWidth;
  for (int p = threadIdx.x; p < min(kRoutedRows, rows - first_row) * packs; p += kThreads) {
    const int row = p / packs, column = p % packs * kWidth;
    const Pack<T> pack = load_pack_coherent(x + size_t(first_row + row) * hidden + column);
    for (int i = 0; i < top_k; ++i) store_pack(y + size_t(slots[row * top_k + i]) * hidden + column, pack);
  }
}

// A warp has a row, as in layernorm.cu.
constexpr int kCombined = 4;

template <typename T, int kPacks>
__global__ void __launch_bounds__(kCombined * 32)
    combine_kernel(const T* x, const T* outputs, const RoutedRows routed, const float* bias, const Norm norm, int rows,
                   int hidden, float epsilon, T* y) {
  const int lane = threadIdx.x % 32, row = blockIdx.x * kCombined + threadIdx.x / 32, top_k = routed.kind.top_k;
  griddepcontrol_launch_dependents();
  WarpRow<T, kPacks> values, gamma, beta;
  Pack<T> packs[kPacks];
  values.clear();
  values.load_vector(bias, lane, hidden);
  griddepcontrol_wait();
  if (row >= rows) return;
  load_row(packs, x + size_t(row) * hidden, lane, hidden);
  values.add(packs, lane, hidden);
  for (int i = 0; i < top_k; ++i) {
    const float share = (routed.routes + size_t(row) * top_k + i)->share;
    load_row(packs, outputs + size_t(*(routed.slots + size_t(row) * top_k + i)) * hidden, lane, hidden);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!values.holds(p, lane, hidden)) continue;
#pragma unroll
      for (int k = 0; k < Pack<T>::kSize; ++k)
        values.values[p][k] = fmaf(share, to_float(packs[p].values[k]), values.values[p][k]);
    }
  }
  gamma.load_vector(norm.gamma, lane, hidden);
  beta.load_vector(norm.beta, lane, hidden);
  values.normalize_into(y + size_t(row) * hidden, gamma, beta, lane, hidden, epsilon);
}

// Models with experts have rows of 768 elements: 3 packs in 16 bits, 6 in FP32.
using RoutedPacks = std::integer_sequence<int, 3, 6, kMaxRowPacks>;

int blocks_of(int rows) {
  return (rows + kRoutedRows - 1) / kRoutedRows;
}

}  // namespace

Status route_rows(DType dtype, const void* x, const float* weight, int rows, int hidden, const RoutedRows& routed,
                  const Stream& stream) {
  const ExpertKind kind = routed.kind;
  if (kind.experts < 1 || kind.experts > kMaxExperts || kind.top_k < 1 || kind.top_k > kind.experts)
    return Status::refused("route: ", kind.top_k, " of ", kind.experts, " experts; at most ", kMaxExperts);
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return with_row_packs_of<T>("route", hidden, RoutedPacks(), [&](auto packs) {
      return launch("route", route_kernel<T, packs>, blocks_of(rows), kThreads, 0, stream, static_cast<const T*>(x),
                    weight, rows, hidden, routed);
    });
  });
}

Status group_rows(DType dtype, const void* x, int rows, int hidden, const RoutedRows& routed, void* y,
                  const Stream& stream) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return launch("group", group_kernel<T>, blocks_of(rows), kThreads, 0, stream, static_cast<const T*>(x), rows,
                  hidden, int(max_expert_tiles(routed.kind, rows)), routed, static_cast<T*>(y));
  });
}

Status combine_rows(DType dtype, const void* x, const void* outputs, const RoutedRows& routed, const float* bias,
                    const Norm& norm, int rows, int hidden, float epsilon, void* y, const Stream& stream) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return with_row_packs_of<T>("combine", hidden, RoutedPacks(), [&](auto packs) {
      return launch("combine", combine_kernel<T, packs>, (rows + kCombined - 1) / kCombined, kCombined * 32, 0, stream,
                    static_cast<const T*>(x), static_cast<const T*>(outputs), routed, bias, norm, rows, hidden, epsilon,
                    static_cast<T*>(y));
    });
  });
}

}  // namespace embert
