// One FP32 vector a sequence: cls, mean, max or last token, cut to the asked dimensions (Matryoshka) and scaled to
// length 1.
//
// A block a sequence. Mean and max: each of kGroups thread groups takes every kGroups-th token in order, then the
// groups are combined in order; nothing depends on the rest of the batch. With a Norm the last LayerNorm is applied on
// the way, in FP32. Floor at T = 26 692, H = 768, FP16: 41 MB read, 14 µs.

#include "kernels.h"
#include "numeric.cuh"
#include "row_sums.cuh"

namespace embert {
namespace {

constexpr int kThreads = 512;
constexpr int kMaxHidden = 8192;

constexpr int kScaledRows = 512;  // whose LayerNorm scales are in shared memory at a time

template <typename T, Pooling kPooling>
__global__ void __launch_bounds__(kThreads)
    pool_kernel(const Rows rows, bool gathered, const Norm norm, float epsilon, const int* cu_seqlens,
                const uint32_t* cuts, int hidden, float* vectors) {
  constexpr int kWidth = Pack<T>::kSize;
  extern __shared__ float shared[];  // [groups][hidden]
  __shared__ float squares[kThreads / 32];
  __shared__ float2 scales[kScaledRows];
  // Written by offsets.cu: early enough (numeric.cuh, early_tile).
  const int first = __ldcg(cu_seqlens + blockIdx.x), end = __ldcg(cu_seqlens + blockIdx.x + 1);
  const uint32_t cut = __ldcg(cuts + blockIdx.x);
  wait_for_earlier_kernels();
  dependents_may_launch();
  if (first == end) return;  // past the last sequence of the batch

  const int packs = hidden / kWidth;
  constexpr bool kWalks = kPooling == Pooling::kMean || kPooling == Pooling::kMax;
  const int groups = kWalks ? max(1, kThreads / packs) : 1;
  const int row_zero = gathered ? blockIdx.x : kPooling == Pooling::kLast ? end - 1 : first;
  const int length = kWalks ? end - first : 1;
  const T* const data = static_cast<const T*>(rows.data) + size_t(row_zero) * hidden;
  const T* const gamma = static_cast<const T*>(norm.gamma);
  const T* const beta = static_cast<const T*>(norm.beta);
  for (int start = 0; start < length; start += kScaledRows) {
    const int stop = min(length, start + kScaledRows);
    if (rows.sums != nullptr) {
      __syncthreads();
      for (int t = start + threadIdx.x; t < stop; t += kThreads)
        scales[t - start] = row_scale(rows, row_zero + t, hidden, epsilon);
      __syncthreads();
    }
    for (int item = threadIdx.x; item < groups * packs; item += kThreads) {
      const int group = item / packs, pack = item % packs;
      float* const total = shared + group * hidden + pack * kWidth;
      float sum[kWidth];
      Pack<T> gammas, betas;
      if (kPooling == Pooling::kMax && gamma != nullptr) {
        gammas = load_pack(gamma + pack * kWidth);
        betas = load_pack(beta + pack * kWidth);
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] = start > 0 ? total[i] : kPooling == Pooling::kMax ? -INFINITY : 0.0f;
#pragma unroll 4
      for (int t = start + group; t < stop; t += groups) {
        const Pack<T> x = load_fresh(data + size_t(t) * hidden + pack * kWidth);
        const float2 scale = rows.sums != nullptr ? scales[t - start] : float2{1.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          float value = fmaf(to_float(x.values[i]), scale.x, scale.y);
          if (kPooling == Pooling::kMax && gamma != nullptr)
            value = fmaf(value, to_float(gammas.values[i]), to_float(betas.values[i]));
          sum[i] = kPooling == Pooling::kMax ? fmaxf(sum[i], value) : sum[i] + value;
        }
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) total[i] = sum[i];
    }
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
    if (kPooling != Pooling::kMax && gamma != nullptr)
      value = fmaf(value, to_float(gamma[column]), to_float(beta[column]));
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
Status launch_pool(Pooling pooling, const Rows& rows, bool gathered, const Norm& norm, float epsilon,
                   const int* cu_seqlens, const uint32_t* cuts, int sequences, int hidden, float* vectors,
                   const Stream& stream) {
  const int packs = hidden / Pack<T>::kSize;
  const bool walks = pooling == Pooling::kMean || pooling == Pooling::kMax;
  const size_t bytes =
      size_t(walks ? std::max(1, kThreads / packs) : 1) * hidden * sizeof(float);  // ≤ 16 KB or one row
  const auto run = [&](auto kernel) {
    return launch("pool", kernel, sequences, kThreads, bytes, stream, rows, gathered, norm, epsilon, cu_seqlens, cuts,
                  hidden, vectors);
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

Status pool(DType dtype, Pooling pooling, const Rows& rows, bool gathered, const Norm& norm, float epsilon,
            const int* cu_seqlens, const uint32_t* cuts, int sequences, int hidden, float* vectors,
            const Stream& stream) {
  if (rows.sums != nullptr && hidden > kMaxSumColumns)
    return Status::refused("pool: hidden size " + std::to_string(hidden) + " is too large for a LayerNorm's sums");
  if (hidden % (16 / bytes_of(dtype)) != 0 || hidden > kMaxHidden) {
    return Status::refused("pool: hidden size " + std::to_string(hidden) + " is not supported");
  }
  if (gathered && (pooling == Pooling::kMean || pooling == Pooling::kMax))
    return Status::refused("pool: this pooling reads every row");
  switch (dtype) {
    case DType::kFloat16:
      return launch_pool<half_t>(pooling, rows, gathered, norm, epsilon, cu_seqlens, cuts, sequences, hidden, vectors,
                                 stream);
    case DType::kBFloat16:
      return launch_pool<bfloat_t>(pooling, rows, gathered, norm, epsilon, cu_seqlens, cuts, sequences, hidden, vectors,
                                   stream);
    default:
      return launch_pool<float>(pooling, rows, gathered, norm, epsilon, cu_seqlens, cuts, sequences, hidden, vectors,
                                stream);
  }
}

}  // namespace embert
