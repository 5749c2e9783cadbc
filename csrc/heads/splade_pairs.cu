// Maxima → pairs, in two passes, because the offset of a text's pairs depends on the number of pairs of earlier texts.
// The counting pass makes the sums that the second pass starts from, and no block waits for another.
//
// Floor for 256 texts of 30 522 columns: 31 MB written once and read twice, mostly in the L2 cache.

#include "common/launch.cuh"
#include "gemm/gemm.h"
#include "heads/splade.h"

namespace embert {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kLoads = kPieceColumns / kThreads;   // of a thread: 32 adjacent columns a warp each
constexpr int kClearedColumns = 8 * kThreads * 4;  // of a block, 16 bytes a thread at a time
static_assert(kMaximaColumns % 4 == 0, "rows of maxima are cleared 16 bytes at a time");

__device__ __forceinline__ int sequence_of(const TextSpan& span, int text) {
  return span.chosen == nullptr ? text : span.chosen[text];
}

// Blocks (text, part of its maxima). The first block of a text also writes the text's rows, and the following rows that
// belong to no text.
__global__ void __launch_bounds__(kThreads)
    begin_maxima_kernel(const TextSpan span, int pitch, int* text_of, float* maxima, int* totals) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  auto* const text_maxima = reinterpret_cast<float4*>(maxima + size_t(blockIdx.x) * pitch);
  const int end_column = min(pitch, int(blockIdx.y + 1) * kClearedColumns);
  for (int column = blockIdx.y * kClearedColumns + threadIdx.x * 4; column < end_column; column += kThreads * 4)
    text_maxima[column / 4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (blockIdx.y > 0) return;
  const int text = span.first + blockIdx.x, sequence = sequence_of(span, text);
  const bool is_last = int(blockIdx.x) + 1 == span.count;
  const int first = span.cu_seqlens[sequence], end = span.cu_seqlens[sequence + 1];
  const int next = is_last ? span.end_row : span.cu_seqlens[sequence_of(span, text + 1)];
  for (int row = first + threadIdx.x; row < next; row += kThreads) text_of[row] = row < end ? text : kNoText;
  if (threadIdx.x == 0) totals[blockIdx.x] = 0;
}

// A thread's columns of a piece: lane + 32i from its warp's first on. Bits, because those of a NaN are not 0 either.
__device__ __forceinline__ void load_columns(const float* maxima, int columns, int pitch, int (&bits)[kLoads]) {
  const int first = blockIdx.x * kPieceColumns + threadIdx.x / 32 * (32 * kLoads) + threadIdx.x % 32;
  const int* const row = reinterpret_cast<const int*>(maxima) + size_t(blockIdx.y) * pitch;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) bits[i] = first + 32 * i < columns ? __ldcg(row + first + 32 * i) : 0;
}

// The sum of one value per thread; all of them get it. For all threads of the block, once: it uses shared memory.
__device__ __forceinline__ int block_sum(int value) {
  __shared__ int warp_totals[kWarps];
  value = __reduce_add_sync(~0u, value);
  if (threadIdx.x % 32 == 0) warp_totals[threadIdx.x / 32] = value;
  __syncthreads();
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += warp_totals[i];
  return sum;
}

__global__ void __launch_bounds__(kThreads)
    count_pairs_kernel(const float* maxima, int columns, int pitch, int* totals, int* pieces) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  int bits[kLoads], count = 0;
  load_columns(maxima, columns, pitch, bits);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) count += bits[i] != 0;
  count = block_sum(count);
  if (threadIdx.x > 0) return;
  pieces[blockIdx.y * gridDim.x + blockIdx.x] = count;
  if (count > 0) atomicAdd(totals + blockIdx.y, count);
}

// A block writes the pairs of a piece of a text. Each block sums the counts before it in the span (texts and pieces)
// again.
__global__ void __launch_bounds__(kThreads)
    write_pairs_kernel(const float* maxima, int columns, int pitch, int first_text, const int* totals,
                       const int* pieces, const int64_t* before, int64_t* after, const PairBuffers to) {
  __shared__ int warp_totals[kWarps];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int piece = blockIdx.x, text = blockIdx.y;
  const int in_text = totals[text], in_piece = pieces[text * gridDim.x + piece];
  const bool is_first = piece == 0, is_last = is_first && text + 1 == int(gridDim.y);
  if (is_first && threadIdx.x == 0) to.counts[first_text + text] = in_text;
  if (in_piece == 0 && !is_last) return;

  int earlier = 0;
  for (int i = threadIdx.x; i < text; i += kThreads) earlier += totals[i];
  const int64_t start = (before == nullptr ? 0 : *before) + block_sum(earlier), end = start + in_text;
  if (is_last && threadIdx.x == 0) *after = end;
  if (in_piece == 0 || end > to.capacity) return;

  int bits[kLoads], in_warp = 0;
  load_columns(maxima, columns, pitch, bits);
  uint32_t masks[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    masks[i] = __ballot_sync(~0u, bits[i] != 0);
    in_warp += __popc(masks[i]);
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) warp_totals[warp] = in_warp;
  int in_pieces = 0;  // of the text's pieces before this one
  for (int i = lane; i < piece; i += 32) in_pieces += pieces[text * gridDim.x + i];
  int64_t offset = start + __reduce_add_sync(~0u, in_pieces);
  __syncthreads();
  for (int i = 0; i < warp; ++i) offset += warp_totals[i];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (bits[i] != 0) {
      const int64_t place = offset + __popc(masks[i] & ((1u << lane) - 1));
      const float value = log1pf(__int_as_float(bits[i]));
      to.indices[place] = piece * kPieceColumns + (warp * kLoads + i) * 32 + lane;
      to.values[place] = to.logs == 2 ? log1pf(value) : value;
    }
    offset += __popc(masks[i]);
  }
}

Status check_count(const char* name, int count) {
  if (count <= 65535) return {};
  return Status::refused(name, ": ", count, " texts at a time, at most 65535");
}

}  // namespace

Status begin_maxima(const TextSpan& span, int pitch, int* text_of, float* maxima, int* totals, const Stream& stream) {
  const dim3 grid(span.count, (pitch + kClearedColumns - 1) / kClearedColumns);
  return launch("begin_maxima", begin_maxima_kernel, grid, kThreads, 0, stream, span, pitch, text_of, maxima, totals);
}

Status count_pairs(const float* maxima, int columns, int pitch, int count, int* totals, int* pieces,
                   const Stream& stream) {
  EMBERT_TRY(check_count("count_pairs", count));
  return launch("count_pairs", count_pairs_kernel, dim3(pieces_of(columns), count), kThreads, 0, stream, maxima,
                columns, pitch, totals, pieces);
}

Status write_pairs(const float* maxima, int columns, int pitch, int first, int count, const int* totals,
                   const int* pieces, const int64_t* before, int64_t* after, const PairBuffers& to,
                   const Stream& stream) {
  EMBERT_TRY(check_count("write_pairs", count));
  return launch("write_pairs", write_pairs_kernel, dim3(pieces_of(columns), count), kThreads, 0, stream, maxima,
                columns, pitch, first, totals, pieces, before, after, to);
}

}  // namespace embert
