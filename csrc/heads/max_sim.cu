// MaxSim of documents with queries of the same batch. Vectors of tokens stay on the device.

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "heads/heads.h"
#include "heads/inverse_length.cuh"

namespace embert {
namespace {

// A block scores one document with kScoreVectors vectors of its query: a lane has one of them. The block's warps share
// the document's vectors, kTokens at a time. Products are added in FP32 in the order of the columns, a maximum is the
// same in any order, and the sum over lanes has a fixed order, so a score does not depend on the batch.
//
// Floor for 100 documents of 300 tokens with a query of 32, 128 columns in FP16: 8 MB read, 3 µs at 3 TB/s; 0.25 GFLOP,
// 4 µs at 60 TFLOP/s.

constexpr int kWarps = 8, kTokens = 4;
constexpr int kGap = 4;  // floats between vectors, so that lanes read from different banks
constexpr float kNone = -INFINITY;

template <typename T>
__global__ void __launch_bounds__(kWarps * 32)
    max_sim_kernel(const T* x, int columns, const int* spans, int documents, int parts, float* y) {
  constexpr int kWidth = Pack<T>::kSize;
  extern __shared__ float4 memory[];
  float* const vectors = reinterpret_cast<float*>(memory);  // [kScoreVectors, columns + kGap]
  __shared__ float largest[kWarps][kScoreVectors];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pitch = columns + kGap;
  const int document = blockIdx.x, part = blockIdx.y;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const int* const rows = spans + 4 * documents;
  const int* const span = spans + 4 * document;
  const int* const of_query = rows + span[0] + part * kScoreVectors;
  const int* const of_document = rows + span[2];
  const int count = min(span[1] - part * kScoreVectors, kScoreVectors), tokens = span[3];
  float* const to = y + size_t(document) * parts + part;
  if (count <= 0) {  // the whole block
    if (threadIdx.x == 0) *to = 0.0f;
    return;
  }
  for (int vector = warp; vector < kScoreVectors; vector += kWarps) {
    const T* const row = x + size_t(of_query[min(vector, count - 1)]) * columns;
    const float scale = inverse_length(row, columns, lane);
    for (int column = lane; column < columns; column += 32)
      vectors[vector * pitch + column] = to_float(row[column]) * scale;
  }
  __syncthreads();
  const float* const own = vectors + lane * pitch;
  float most = kNone;
  for (int first = warp * kTokens; first < tokens; first += kWarps * kTokens) {
    const T* row[kTokens];
    float scale[kTokens], product[kTokens] = {};
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {  // the last one again, after a document's end
      row[i] = x + size_t(of_document[min(first + i, tokens - 1)]) * columns;
      scale[i] = inverse_length(row[i], columns, lane);
    }
#pragma unroll 2
    for (int column = 0; column < columns; column += kWidth) {
      Pack<T> pack[kTokens];
#pragma unroll
      for (int i = 0; i < kTokens; ++i) pack[i] = load_pack_coherent(row[i] + column);
#pragma unroll
      for (int c = 0; c < kWidth; c += 4) {
        const Pack<float> four = *reinterpret_cast<const Pack<float>*>(own + column + c);
#pragma unroll
        for (int i = 0; i < kTokens; ++i)
#pragma unroll
          for (int k = 0; k < 4; ++k) product[i] = fmaf(four.values[k], to_float(pack[i].values[c + k]), product[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) most = larger(most, product[i] * scale[i]);
  }
  largest[warp][lane] = most;
  __syncthreads();
  if (warp != 0) return;
  for (int other = 1; other < kWarps; ++other) most = larger(most, largest[other][lane]);
  const float total = warp_sum(lane < count ? most : 0.0f);
  if (lane == 0) *to = total;
}

}  // namespace

Status max_sims(DType dtype, const void* x, int columns, const int* spans, int documents, int parts, float* y,
                const Stream& stream) {
  if (columns % 8 != 0 || columns > kMaxScoreColumns)
    return Status::refused("max_sims: ", columns, " columns are not supported");
  const size_t bytes = size_t(kScoreVectors) * (columns + kGap) * sizeof(float);
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return launch("max_sims", max_sim_kernel<T>, dim3(documents, parts), kWarps * 32, bytes, stream,
                  static_cast<const T*>(x), columns, spans, documents, parts, y);
  });
}

}  // namespace embert
