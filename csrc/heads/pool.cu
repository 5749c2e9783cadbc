// Pooling: one FP32 vector a sequence, by cls, mean, max or last token, truncated to the requested dimensions
// (Matryoshka) and normalized to length 1.
//
// For mean and max a block's threads form groups, each of which processes a row at a time. A group keeps two sums, each
// of every other row, and adds them at the end; then the groups' sums are added in order. So results are
// batch-invariant. With a Norm, this kernel also applies the last LayerNorm, in FP32.
//
// Floor for 26 692 rows of 768, FP16: 41 MB read, 14 µs. Registers do not hold as many rows as memory needs in flight.
// So rows are copied to shared memory, and a thread starts the next copy as soon as it has read a row. It reads only
// what it has copied itself, so no barrier is needed.
//
// For one sequence latency is the cost: gamma and beta are loaded before the wait, and the first rows together with
// their row statistics.

#include <algorithm>
#include <type_traits>

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "common/shared_memory.cuh"
#include "heads/heads.h"
#include "ops/row_stats.cuh"

namespace embert {
namespace {

constexpr int kThreads = 512;
constexpr int kMaxGroups = 16;    // of a block's threads
constexpr int kScaleLanes = 8;    // lanes that add a row's statistics where they come in parts
constexpr int kScaledRows = 640;  // rows of a block whose LayerNorm scales are in shared memory at a time
// Rows of a group that are in flight or in use. By count: at 3 TB/s and 0.8 µs of latency 18 KB per multiprocessor must
// be in flight, and under load twice that. A block with five rows of each of five groups of 768 has 38 KB. Measured, 4
// and 6 are equal, and 8 and more slower: 25 712 tokens of passages 20.9, 21.1, 21.6 µs, 22.4 with plain loads. A
// kernel that only reads those bytes takes 14.4; for 128 × 128 it takes 10.2, pooling 11.4.
constexpr int kRowsAhead = 6;

// Combines two rows' elements: their sum, or the larger one.
template <Pooling kPooling>
__device__ __forceinline__ float merged(float a, float b) {
  return kPooling == Pooling::kMax ? fmaxf(a, b) : a + b;
}

// Stores the LayerNorm's scales of `count` rows; for all threads of the block. `row_of(i)`: the i-th row.
template <typename RowOf>
__device__ __forceinline__ void store_row_scales(const RowView& rows, int count, RowOf row_of, int width, float epsilon,
                                                 float2* scales) {
  if (rows.stats == nullptr || rows.splits == 1) {
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kThreads)
      scales[i] = rows.stats == nullptr ? float2{1.0f, 0.0f} : row_scale(rows, row_of(i), width, epsilon);
    return;
  }
#pragma unroll 1
  for (int warp_first = threadIdx.x / 32 * (32 / kScaleLanes); warp_first < count;
       warp_first += kThreads / kScaleLanes) {
    const int i = warp_first + threadIdx.x % 32 / kScaleLanes;
    const float2 scale = row_scale(rows, row_of(min(i, count - 1)), width, epsilon, threadIdx.x % kScaleLanes);
    if (i < count && threadIdx.x % kScaleLanes == 0) scales[i] = scale;
  }
}

constexpr int kStaticShared = kScaledRows * 8 + kMaxStatColumns * 8 + kThreads / 32 * 4;  // bytes
constexpr int kPipeline = kRowsAhead * kThreads * 16, kMaxSums = kThreads * 8 * 4;        // bytes
static_assert(kStaticShared + kMaxSums + kPipeline <= 99 << 10, "what a block may have on the devices that have least");

// kChosen: not all sequences are pooled. It is a template argument because as a kernel argument it would cost
// registers, and none is free.
template <typename T, Pooling kPooling, bool kChosen>
__global__ void __launch_bounds__(kThreads, 2)
    pool_kernel(const RowView rows, bool gathered, const Norm norm, float epsilon, const int* cu_seqlens,
                const uint32_t* cuts, const int* chosen, int hidden, float* vectors) {
  constexpr int kWidth = Pack<T>::kSize;
  constexpr bool kReduces = kPooling == Pooling::kMean || kPooling == Pooling::kMax;
  constexpr bool kNormsLast = kPooling != Pooling::kMax;  // the LayerNorm's gamma and beta, after the sum
  constexpr int kSums = kReduces ? 2 : 1;                 // of a thread
  extern __shared__ __align__(16) float shared[];         // [groups][hidden], then Pack<T> [kRowsAhead][kThreads]
  __shared__ float squares[kThreads / 32];
  __shared__ float2 scales[kReduces ? kScaledRows : 1];
  __shared__ float2 last_norm[kNormsLast ? kMaxStatColumns : 1];  // gamma and beta; a thread reads what it wrote
  // Written by offsets.cu, early enough for a read here (early_tile in ops/attention_work.h). `chosen` was there
  // before the batch's first kernel.
  const int sequence = kChosen ? __ldcg(chosen + blockIdx.x) : blockIdx.x;
  const int first = __ldcg(cu_seqlens + sequence), end = __ldcg(cu_seqlens + sequence + 1);
  const uint32_t cut = cuts == nullptr ? kCutKeepsLength : __ldcg(cuts + sequence);
  if (kNormsLast && norm.gamma != nullptr) {
#pragma unroll 1
    for (int column = threadIdx.x; column < hidden; column += kThreads)
      last_norm[column] = {norm.gamma[column], norm.beta[column]};
  }
  const int length = kReduces ? end - first : 1;
  const int row_zero = gathered ? sequence : kPooling == Pooling::kLast ? end - 1 : first;
  const int packs = hidden / kWidth, groups = kReduces ? min(kMaxGroups, kThreads / packs) : 1;
  const int group = threadIdx.x / packs, pack = threadIdx.x % packs;
  const int scaled = kScaledRows / (kSums * groups) * (kSums * groups);  // rows at a time
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (first == end) return;  // past the batch's last sequence

  float gamma[kWidth], beta[kWidth];
  if (kPooling == Pooling::kMax && norm.gamma != nullptr && group < groups) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      gamma[k] = __ldg(norm.gamma + pack * kWidth + k);
      beta[k] = __ldg(norm.beta + pack * kWidth + k);
    }
  }
  float sums[kSums][kWidth];
#pragma unroll
  for (int i = 0; i < kSums * kWidth; ++i) sums[i / kWidth][i % kWidth] = kPooling == Pooling::kMax ? -INFINITY : 0.0f;
  int row = group < groups ? group : length;  // the group's next
  int next = row;                             // the one to copy next
  const T* from = static_cast<const T*>(rows.data) + size_t(row_zero + row) * hidden + pack * kWidth;
  Pack<T>* const thread_stages = reinterpret_cast<Pack<T>*>(shared + groups * hidden) + threadIdx.x;
  const auto prefetch = [&](int slot) {
    if (next < length) cp_async(shared_address(thread_stages + slot * kThreads), from, true);
    cp_async_commit();
    next += groups;
    from += size_t(groups) * hidden;
  };
  int slot = 0;
  Pack<T> x;
  if constexpr (kReduces) {
#pragma unroll
    for (int i = 0; i + 1 < kRowsAhead; ++i) prefetch(i);
  } else if (row < length) {
    x = load_pack_coherent(from);
  }
  for (int start = 0; start < length; start += scaled) {
    const int stop = min(length, start + scaled);
    if (start > 0) __syncthreads();
    store_row_scales(rows, stop - start, [&](int i) { return row_zero + start + i; }, hidden, epsilon, scales);
    __syncthreads();
    for (; row < stop; row += kSums * groups) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        if constexpr (kReduces) {
          prefetch(slot == 0 ? kRowsAhead - 1 : slot - 1);
          cp_async_wait<kRowsAhead - 1>();
          x = thread_stages[slot * kThreads];
          slot = slot + 1 == kRowsAhead ? 0 : slot + 1;
          keep_packed(x);  // which also keeps the next copy behind this read
        }
        if (row + i * groups >= length) continue;
        const float2 scale = scales[row + i * groups - start];
        float (&sum)[kWidth] = sums[i];
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          float value = fmaf(to_float(x.values[k]), scale.x, scale.y);
          if (kPooling == Pooling::kMax && norm.gamma != nullptr) value = fmaf(value, gamma[k], beta[k]);
          sum[k] = merged<kPooling>(sum[k], value);
        }
      }
    }
  }
  auto* const partial = reinterpret_cast<float4*>(shared + group * hidden + pack * kWidth);
  float (&sum)[kWidth] = sums[0];
  if (group < groups) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if constexpr (kSums == 2) sum[k] = merged<kPooling>(sum[k], sums[1][k]);
    }
#pragma unroll
    for (int k = 0; k < kWidth; k += 4) partial[k / 4] = {sum[k], sum[k + 1], sum[k + 2], sum[k + 3]};
  }
  __syncthreads();

  const int requested = int(cut & ~kCutKeepsLength);
  const int dimensions = requested == 0 ? hidden : min(requested, hidden);
  float square = 0.0f;
#pragma unroll 1
  for (int column = threadIdx.x; column < hidden; column += kThreads) {
    float value = shared[column];
    for (int other = 1; other < groups; ++other) value = merged<kPooling>(value, shared[other * hidden + column]);
    if (kPooling == Pooling::kMean) value /= float(length);
    if (kNormsLast && norm.gamma != nullptr) value = fmaf(value, last_norm[column].x, last_norm[column].y);
    if (column >= dimensions) value = 0.0f;
    shared[column] = value;
    square = fmaf(value, value, square);
  }
  square = warp_sum(square);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
  __syncthreads();
  float scale = 1.0f;
  if ((cut & kCutKeepsLength) == 0) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) total += squares[i];
    scale = 1.0f / fmaxf(sqrtf(total), 1e-12f);
  }
#pragma unroll 1
  for (int column = threadIdx.x; column < hidden; column += kThreads) {
    vectors[size_t(blockIdx.x) * hidden + column] = shared[column] * scale;
  }
}

// The end of pool.cu, for rows that went through Dense modules: truncated to the requested dimensions (Matryoshka) and
// normalized to length 1. One block per row; the launch is the cost.

constexpr int kCutThreads = 256;

__global__ void __launch_bounds__(kCutThreads)
    cut_kernel(const float* x, const uint32_t* cuts, const int* chosen, int width, float* y) {
  __shared__ float squares[kCutThreads / 32];
  const size_t start = size_t(blockIdx.x) * width;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const uint32_t cut = cuts[chosen == nullptr ? blockIdx.x : chosen[blockIdx.x]];
  const int requested = int(cut & ~kCutKeepsLength);
  const int dimensions = requested == 0 ? width : min(requested, width);
  float square = 0.0f;
  for (int column = threadIdx.x; column < dimensions; column += kCutThreads)
    square = fmaf(x[start + column], x[start + column], square);
  square = warp_sum(square);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
  __syncthreads();
  float scale = 1.0f;
  if ((cut & kCutKeepsLength) == 0) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kCutThreads / 32; ++i) total += squares[i];
    scale = 1.0f / fmaxf(sqrtf(total), 1e-12f);
  }
  for (int column = threadIdx.x; column < width; column += kCutThreads)
    y[start + column] = column < dimensions ? x[start + column] * scale : 0.0f;
}

// Gathers the rows that pooling by cls or by the last token reads, one a sequence. After the last attention no other
// row is needed, so later ops run on B rows instead of T.
//
// A warp copies a sequence's row of context and of x. The launch is the cost.

constexpr int kWarps = 4;

template <typename T>
__global__ void __launch_bounds__(kWarps * 32)
    gather_kernel(const T* context, int context_columns, const RowView x, const int* cu_seqlens, bool last,
                  int sequences, int hidden, T* context_to, T* x_to, float2* sums_to) {
  const int lane = threadIdx.x % 32, sequence = blockIdx.x * kWarps + threadIdx.x / 32;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (sequence >= sequences) return;
  const int first = cu_seqlens[sequence], end = cu_seqlens[sequence + 1];
  if (first == end) return;  // past the batch's last sequence
  const size_t row = last ? end - 1 : first;
  const auto copy = [&](const T* from, int columns, T* to) {
    for (int column = lane * Pack<T>::kSize; column < columns; column += 32 * Pack<T>::kSize)
      store_pack(to + size_t(sequence) * columns + column, load_pack_coherent(from + row * columns + column));
  };
  copy(context, context_columns, context_to);
  copy(static_cast<const T*>(x.data), hidden, x_to);
  if (x.stats == nullptr) return;
  const int sums = (hidden + kStatColumns - 1) / kStatColumns * x.splits;
  for (int i = lane; i < sums; i += 32) sums_to[size_t(sequence) * sums + i] = x.stats[row * sums + i];
}

}  // namespace

Status pool(DType dtype, Pooling pooling, const RowView& rows, bool gathered, const Norm& norm, float epsilon,
            const int* cu_seqlens, const uint32_t* cuts, const int* chosen, int sequences, int hidden, float* vectors,
            const Stream& stream) {
  const int pack = 16 / bytes_of(dtype);
  if ((rows.stats != nullptr || norm.gamma != nullptr) && hidden > kMaxStatColumns)
    return Status::refused("pool: hidden size ", hidden, " is too large for a LayerNorm");
  if (hidden % pack != 0) return Status::refused("pool: hidden size ", hidden, " is not supported");
  if (hidden / pack > kThreads) return Status::refused("pool: hidden size ", hidden, " is too large");
  const bool reduces = pooling == Pooling::kMean || pooling == Pooling::kMax;
  if (gathered && reduces) return Status::refused("pool: this pooling reads every row");
  const int groups = std::min(kMaxGroups, kThreads / (hidden / pack));
  const int row_bytes = hidden * int(sizeof(float));
  const int bytes = reduces ? groups * row_bytes + kPipeline : row_bytes;  // of shared memory
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const auto run = [&](auto constant) -> Status {
      constexpr Pooling kPooling = decltype(constant)::value;
      const auto kernel = chosen == nullptr ? pool_kernel<T, kPooling, false> : pool_kernel<T, kPooling, true>;
      EMBERT_TRY(allow_shared_memory(kernel, bytes, kStaticShared));
      return launch("pool", kernel, sequences, kThreads, bytes, stream, rows, gathered, norm, epsilon, cu_seqlens, cuts,
                    chosen, hidden, vectors);
    };
    return with_constant<Pooling::kCls, Pooling::kMean, Pooling::kMax, Pooling::kLast>(pooling, run);
  });
}

Status cut_rows(const float* x, const uint32_t* cuts, const int* chosen, int rows, int width, float* y,
                const Stream& stream) {
  if (x == y) return Status::refused("cut: rows cannot be cut in place");
  return launch("cut", cut_kernel, rows, kCutThreads, 0, stream, x, cuts, chosen, width, y);
}

Status gather(DType dtype, const void* context, int context_columns, const RowView& x, const int* cu_seqlens,
              Pooling pooling, int sequences, int hidden, void* context_to, void* x_to, float2* sums_to,
              const Stream& stream) {
  if (pooling != Pooling::kCls && pooling != Pooling::kLast)
    return Status::refused("gather: this pooling reads every row");
  const bool last = pooling == Pooling::kLast;
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return launch("gather", gather_kernel<T>, (sequences + kWarps - 1) / kWarps, kWarps * 32, 0, stream,
                  static_cast<const T*>(context), context_columns, x, cu_seqlens, last, sequences, hidden,
                  static_cast<T*>(context_to), static_cast<T*>(x_to), sums_to);
  });
}

}  // namespace embert
