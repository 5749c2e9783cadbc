// One FP32 vector a sequence: cls, mean, max or last token, cut to the asked dimensions (Matryoshka) and scaled to
// length 1.
//
// A block a sequence. Mean and max: each of kGroups thread groups takes every kGroups-th token in order, then the
// groups are combined in order; nothing depends on the rest of the batch. Floor at T = 26 692, H = 768, FP16: 41 MB
// read, 14 µs.

#include "kernels.h"
#include "numeric.cuh"

namespace embert {
namespace {

constexpr int kThreads = 512;
constexpr int kMaxHidden = 8192;

template <typename T, Pooling kPooling>
__global__ void __launch_bounds__(kThreads)
    pool_kernel(const T* hidden_states, const int* cu_seqlens, const uint32_t* cuts, int hidden, float* vectors) {
  constexpr int kWidth = Pack<T>::kSize;
  extern __shared__ float shared[];  // [groups][hidden]
  __shared__ float squares[kThreads / 32];
  dependents_may_launch();
  wait_for_earlier_kernels();
  const int first = cu_seqlens[blockIdx.x], end = cu_seqlens[blockIdx.x + 1];
  if (first == end) return;  // past the last sequence of the batch
  const uint32_t cut = cuts[blockIdx.x];

  const int packs = hidden / kWidth;
  constexpr bool kWalks = kPooling == Pooling::kMean || kPooling == Pooling::kMax;
  const int groups = kWalks ? max(1, kThreads / packs) : 1;
  const T* row_zero = hidden_states + size_t(kPooling == Pooling::kLast ? end - 1 : first) * hidden;
  for (int item = threadIdx.x; item < groups * packs; item += kThreads) {
    const int group = item / packs, pack = item % packs;
    float sum[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum[i] = kPooling == Pooling::kMax ? -INFINITY : 0.0f;
    const int length = kWalks ? end - first : 1;
#pragma unroll 4
    for (int t = group; t < length; t += groups) {
      const Pack<T> x = load_fresh(row_zero + size_t(t) * hidden + pack * kWidth);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float value = to_float(x.values[i]);
        sum[i] = kPooling == Pooling::kMax ? fmaxf(sum[i], value) : sum[i] + value;
      }
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) shared[group * hidden + pack * kWidth + i] = sum[i];
  }
  __syncthreads();

  const int asked = int(cut & ~kCutKeepsLength);
  const int dimensions = asked == 0 ? hidden : min(asked, hidden);
  float square = 0.0f;
  for (int column = threadIdx.x; column < hidden; column += kThreads) {
    float value = shared[column];
    for (int group = 1; group < groups; ++group) {
      const float other = shared[group * hidden + column];
      value = kPooling == Pooling::kMax ? fmaxf(value, other) : value + other;
    }
    if (kPooling == Pooling::kMean) value /= float(end - first);
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
  for (int column = threadIdx.x; column < hidden; column += kThreads) {
    vectors[size_t(blockIdx.x) * hidden + column] = shared[column] * scale;
  }
}

template <typename T>
Status launch_pool(Pooling pooling, const void* hidden_states, const int* cu_seqlens, const uint32_t* cuts,
                   int sequences, int hidden, float* vectors, const Stream& stream) {
  const int packs = hidden / Pack<T>::kSize;
  const bool walks = pooling == Pooling::kMean || pooling == Pooling::kMax;
  const size_t bytes =
      size_t(walks ? std::max(1, kThreads / packs) : 1) * hidden * sizeof(float);  // ≤ 16 KB or one row
  const auto run = [&](auto kernel) {
    return launch("pool", kernel, sequences, kThreads, bytes, stream, static_cast<const T*>(hidden_states), cu_seqlens,
                  cuts, hidden, vectors);
  };
  switch (pooling) {
    case Pooling::kCls:
      return run(pool_kernel<T, Pooling::kCls>);
    case Pooling::kMean:
      return run(pool_kernel<T, Pooling::kMean>);
    case Pooling::kMax:
      return run(pool_kernel<T, Pooling::kMax>);
    default:
      return run(pool_kernel<T, Pooling::kLast>);
  }
}

}  // namespace

Status pool(DType dtype, Pooling pooling, const void* hidden_states, const int* cu_seqlens, const uint32_t* cuts,
            int sequences, int hidden, float* vectors, const Stream& stream) {
  if (hidden % (16 / bytes_of(dtype)) != 0 || hidden > kMaxHidden) {
    return Status::refused("pool: hidden size " + std::to_string(hidden) + " is not supported");
  }
  switch (dtype) {
    case DType::kFloat16:
      return launch_pool<half_t>(pooling, hidden_states, cu_seqlens, cuts, sequences, hidden, vectors, stream);
    case DType::kBFloat16:
      return launch_pool<bfloat_t>(pooling, hidden_states, cu_seqlens, cuts, sequences, hidden, vectors, stream);
    default:
      return launch_pool<float>(pooling, hidden_states, cu_seqlens, cuts, sequences, hidden, vectors, stream);
  }
}

}  // namespace embert
