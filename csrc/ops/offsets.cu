// From the lengths of a batch: cu_seqlens, positions and attention's work lists. It also copies the ids to the device.
//
// A block processes 32 sequences. It sums everything before them (at most B ints, from L2), one warp scans its own 32,
// then its threads write the tokens. No block waits for another, so one launch is the whole prefix sum. Floor: 3 writes
// and 2 reads of T ints, 20 B a token; 0.2 µs for 26 692 tokens at 3 TB/s, so the launch is the cost.

#include "common/launch.cuh"
#include "ops/embedding.h"

namespace embert {
namespace {

constexpr int kSequences = 32;  // of a block: one warp scans them
constexpr int kThreads = 1024;
static_assert(kThreads == 32 * kSequences, "a warp a sequence");

// Tokens, attention tiles and short sequences, summed as one number.
struct Counts {
  int tokens, tiles, shorts;
  __device__ Counts operator+(const Counts& other) const {
    return {tokens + other.tokens, tiles + other.tiles, shorts + other.shorts};
  }
};

__device__ Counts counts_of(int length) {
  const bool is_short = length <= kAttentionShort;
  return {length, is_short ? 0 : (length + kAttentionRows - 1) / kAttentionRows, is_short ? 1 : 0};
}

__device__ Counts shuffle_xor(const Counts& c, int step) {
  return {__shfl_xor_sync(~0u, c.tokens, step), __shfl_xor_sync(~0u, c.tiles, step),
          __shfl_xor_sync(~0u, c.shorts, step)};
}
__device__ Counts shuffle_up(const Counts& c, int step) {
  return {__shfl_up_sync(~0u, c.tokens, step), __shfl_up_sync(~0u, c.tiles, step), __shfl_up_sync(~0u, c.shorts, step)};
}

__global__ void __launch_bounds__(kThreads)
    offsets_kernel(OffsetsInput in, OffsetsOutput out, OffsetsCapacity capacity) {
  __shared__ Counts partial[kThreads / 32];
  __shared__ Counts base[kSequences];  // everything before each of this block's sequences
  __shared__ int length_of[kSequences];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();  // the previous batch may still read what is overwritten here

  // Small batches are read from host memory, a microsecond away. So everything that a small batch needs is loaded at
  // once, within the buffer's capacity. Values past the batch's end are ignored.
  const int first = blockIdx.x * kSequences;
  const bool has_id = blockIdx.x == 0 && threadIdx.x < capacity.tokens;
  const int early_id = has_id ? in.ids[threadIdx.x] : 0;
  const int early_type = has_id && in.types != nullptr ? in.types[threadIdx.x] : 0;
  const int early_length = first + lane < capacity.sequences ? in.lengths[first + lane] : 0;
  const uint32_t early_cut = first + warp < capacity.sequences ? in.cuts[first + warp] : 0;
  const int sequences = in.header[0];
  const bool is_last = first + kSequences >= sequences;  // of the blocks with work; the others return
  if (first >= sequences && !(first == 0 && sequences == 0)) return;

  Counts before{0, 0, 0};
  for (int i = threadIdx.x; i < first; i += kThreads) before = before + counts_of(in.lengths[i]);
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) before = before + shuffle_xor(before, step);
  if (lane == 0) partial[warp] = before;
  __syncthreads();

  if (warp == 0) {
    Counts start{0, 0, 0};
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) start = start + partial[i];
    const int length = first + lane < sequences ? early_length : 0;
    Counts inclusive = length > 0 ? counts_of(length) : Counts{0, 0, 0};
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const Counts other = shuffle_up(inclusive, step);
      if (lane >= step) inclusive = inclusive + other;
    }
    Counts exclusive = shuffle_up(inclusive, 1);
    if (lane == 0) exclusive = {0, 0, 0};
    base[lane] = start + exclusive;
    length_of[lane] = length;
    if (lane == 31) partial[0] = start + inclusive;  // the totals, if this is the last block
  }
  __syncthreads();

  // The tokens of this block's sequences lie end to end. A thread has several loads in flight.
  const int count = min(kSequences, sequences - first), start = base[0].tokens;
  const int tokens = count > 0 ? base[count - 1].tokens + length_of[count - 1] - start : 0;
  constexpr int kAhead = 4;
  for (int k = threadIdx.x; k < tokens; k += kAhead * kThreads) {
    int ids[kAhead], types[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int row = start + k + a * kThreads;
      const bool is_early = a == 0 && has_id && k < kThreads, exists = !is_early && k + a * kThreads < tokens;
      ids[a] = exists ? in.ids[row] : early_id;
      types[a] = exists && in.types != nullptr ? in.types[row] : early_type;
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int row = start + k + a * kThreads;
      if (k + a * kThreads >= tokens) break;
      int sequence = 0;  // the last sequence that starts at or before this row
#pragma unroll
      for (int step = kSequences / 2; step > 0; step /= 2) {
        if (sequence + step < count && base[sequence + step].tokens <= row) sequence += step;
      }
      out.ids[row] = ids[a];
      out.types[row] = types[a];
      out.positions[row] = row - base[sequence].tokens;
    }
  }
  if (warp < count) {
    const Counts base_counts = base[warp];
    const int length = length_of[warp];
    if (lane == 0) {
      out.cu_seqlens[first + warp] = base_counts.tokens;
      out.cuts[first + warp] = early_cut;
    }
    if (length <= kAttentionShort) {
      if (lane == 0) out.shorts[base_counts.shorts] = {base_counts.tokens, length, 0, 0};
    } else {
      for (int tile = lane; tile * kAttentionRows < length; tile += 32) {
        out.tiles[base_counts.tiles + tile] = {base_counts.tokens, length, tile * kAttentionRows, 0};
      }
    }
  }
  if (!is_last) return;

  const Counts total = partial[0];
  for (int i = sequences + threadIdx.x; i <= capacity.sequences; i += kThreads) out.cu_seqlens[i] = total.tokens;
  for (int i = total.tokens + threadIdx.x; i < capacity.tokens; i += kThreads) {
    out.ids[i] = 0;
    out.types[i] = 0;
    out.positions[i] = 0;
  }
  for (int i = total.tiles + threadIdx.x; i < capacity.tiles; i += kThreads) out.tiles[i] = {0, 0, 0, 0};
  for (int i = total.shorts + threadIdx.x; i < capacity.shorts; i += kThreads) out.shorts[i] = {0, 0, 0, 0};
}

}  // namespace

Status compute_offsets(const OffsetsInput& in, const OffsetsOutput& out, const OffsetsCapacity& capacity,
                       const Stream& stream) {
  const int blocks = capacity.sequences == 0 ? 1 : (capacity.sequences + kSequences - 1) / kSequences;
  return launch("offsets", offsets_kernel, blocks, kThreads, 0, stream, in, out, capacity);
}

}  // namespace embert
