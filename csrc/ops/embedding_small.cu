// offsets.cu and embedding.cu in one launch, for batches of few rows, whose layer kernels take two microseconds.
//
// A cluster of up to eight blocks embeds one row per warp. The first block reads the whole batch from host memory, with
// one load a thread, and distributes it through the cluster's shared memory. If every block read it, the requests would
// queue at 0.6 µs each. Every warp computes its row's position itself, with a scan over the lengths, while the word's
// row is in flight. One more warp of the first block writes what attention and pooling need. Only results pass through
// device memory.

#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
#include "ops/embedding.h"
#include "ops/embedding_row.cuh"

namespace embert {
namespace {

constexpr int kWarps = 16;  // each embeds a row
constexpr int kThreads = (kWarps + 1) * 32;
static_assert(kSmallRows <= 8 * kWarps, "a cluster");

// Calls f(first, length, start) for 32 sequences at a time, a lane each: its length (0 past the last) and first row.
template <typename F>
__device__ __forceinline__ void for_sequences(const int* lengths, int sequences, int lane, F f) {
  int before = 0;
  for (int first = 0; first < sequences; first += 32) {
    const int length = first + lane < sequences ? lengths[first + lane] : 0;
    int end = length;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const int other = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += other;
    }
    f(first, length, before + end - length);
    before += __shfl_sync(~0u, end, 31);
  }
}

// Writes cu_seqlens, cuts and attention's work lists; for one warp.
__device__ void write_lists(const int* lengths, const int* cuts, int sequences, int tokens, const OffsetsOutput& out,
                            const OffsetsCapacity& capacity, int lane) {
  int tile_count = 0, short_count = 0;
  for_sequences(lengths, sequences, lane, [&](int first, int length, int start) {
    if (length > 0) {
      out.cu_seqlens[first + lane] = start;
      out.cuts[first + lane] = cuts[first + lane];
    }
    const unsigned lower_lanes = (1u << lane) - 1;
    const unsigned shorts = __ballot_sync(~0u, length > 0 && length <= kAttentionShort);
    if (length > 0 && length <= kAttentionShort)
      out.shorts[short_count + __popc(shorts & lower_lanes)] = {start, length, 0, 0};
    short_count += __popc(shorts);
    static_assert(kSmallRows <= 2 * kAttentionRows, "two tiles a sequence");
    const unsigned first_tiles = __ballot_sync(~0u, length > kAttentionShort);
    const unsigned second_tiles = __ballot_sync(~0u, length > kAttentionRows);
    AttentionTile* const tile =
        out.tiles + tile_count + __popc(first_tiles & lower_lanes) + __popc(second_tiles & lower_lanes);
    if (length > kAttentionShort) tile[0] = {start, length, 0, 0};
    if (length > kAttentionRows) tile[1] = {start, length, kAttentionRows, 0};
    tile_count += __popc(first_tiles) + __popc(second_tiles);
  });
  for (int i = sequences + lane; i <= capacity.sequences; i += 32) out.cu_seqlens[i] = tokens;
  for (int i = tile_count + lane; i < capacity.tiles; i += 32) out.tiles[i] = {0, 0, 0, 0};
  for (int i = short_count + lane; i < capacity.shorts; i += 32) out.shorts[i] = {0, 0, 0, 0};
}

template <typename T, int kPacks>
__global__ void __launch_bounds__(kThreads)
    embedding_small_kernel(const EmbeddingTables tables, const OffsetsInput in, int pieces, const OffsetsOutput out,
                           const OffsetsCapacity capacity, int hidden, T* y, float2* sums) {
  extern __shared__ uint4 batch[];  // [pieces]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = cluster_rank(), blocks = gridDim.x;
  if (rank > 0)
    griddepcontrol_launch_dependents();  // the first block not yet: early_tile (ops/attention_work_list.cuh)
  griddepcontrol_wait();                 // the previous batch may still read what is overwritten here
  uint4 piece{};
  if (rank == 0 && threadIdx.x < pieces) piece = reinterpret_cast<const uint4*>(in.header)[threadIdx.x];
  if (blocks > 1) cluster_sync();  // all blocks have started
  if (rank == 0 && threadIdx.x < pieces) {
    for (int block = 0; block < blocks; ++block) *map_shared_rank(batch + threadIdx.x, block) = piece;
  }
  if (blocks > 1)
    cluster_sync();
  else
    __syncthreads();

  const auto brought = [&](const void* part) {
    const size_t offset = static_cast<const uint8_t*>(part) - reinterpret_cast<const uint8_t*>(in.header);
    return reinterpret_cast<const int*>(reinterpret_cast<const uint8_t*>(batch) + offset);
  };
  const int* const lengths = brought(in.lengths);
  const int sequences = brought(in.header)[0], tokens = brought(in.header)[1];
  if (warp == kWarps) {
    if (rank > 0) return;
    write_lists(lengths, brought(in.cuts), sequences, tokens, out, capacity, lane);
    __threadfence();
    __syncwarp();
    griddepcontrol_launch_dependents();
    return;
  }

  const int row = rank * kWarps + warp;
  if (row >= capacity.tokens) return;
  const bool exists = row < tokens;  // the others are as in offsets.cu: token 0 at position 0
  Pack<T> words[kPacks], places[kPacks], kinds[kPacks];
  const auto load = [&](Pack<T>(&packs)[kPacks], const void* table, int index) {
    load_table_row(packs, static_cast<const T*>(table) + size_t(index) * hidden, lane, hidden);
  };
  load(words, tables.word, exists ? brought(in.ids)[row] : 0);
  if (tables.type != nullptr) load(kinds, tables.type, exists ? brought(in.types)[row] : 0);
  int position = 0;
  for_sequences(lengths, exists ? sequences : 0, lane, [&](int, int length, int start) {
    const unsigned begun = __ballot_sync(~0u, length > 0 && start <= row);
    if (begun != 0) position = row - __shfl_sync(~0u, start, 31 - __clz(begun));
  });
  load(places, tables.position, position);
  WarpRow<T, kPacks> values;
  values.clear();
  if (tables.type != nullptr) values.add(kinds, lane, hidden);
  values.add(words, lane, hidden);
  values.add(places, lane, hidden);
  store_unnormalized(values, tables, y, sums, row, lane, hidden);
}

template <typename T>
Status launch_small(const EmbeddingTables& tables, const OffsetsInput& in, size_t bytes, const OffsetsOutput& out,
                    const OffsetsCapacity& capacity, int hidden, void* y, float2* sums, const Stream& stream) {
  return with_row_packs<T>("embedding_small", hidden, [&](auto packs) {
    if constexpr (packs * 32 * Pack<T>::kSize > kMaxStatColumns) {
      return Status::refused("embedding_small: hidden size " + std::to_string(hidden) + " is too large");
    } else {
      const int blocks = (capacity.tokens + kWarps - 1) / kWarps;
      return launch_clusters("embedding_small", embedding_small_kernel<T, packs>, blocks, blocks, kThreads, bytes,
                             stream, tables, in, int(bytes / sizeof(uint4)), out, capacity, hidden, static_cast<T*>(y),
                             sums);
    }
  });
}

}  // namespace

Status embed_small(DType dtype, const EmbeddingTables& tables, const OffsetsInput& in, size_t bytes,
                   const OffsetsOutput& out, const OffsetsCapacity& capacity, int hidden, void* y, float2* sums,
                   const Stream& stream) {
  if (capacity.tokens > kSmallRows || bytes % sizeof(uint4) != 0 || bytes / sizeof(uint4) > kThreads) {
    return Status::refused("embedding_small: a batch of " + std::to_string(capacity.tokens) + " rows in " +
                           std::to_string(bytes) + " bytes");
  }
  switch (dtype) {
    case DType::kFloat16:
      return launch_small<half_t>(tables, in, bytes, out, capacity, hidden, y, sums, stream);
    case DType::kBFloat16:
      return launch_small<bfloat_t>(tables, in, bytes, out, capacity, hidden, y, sums, stream);
    default:
      return Status::refused("embedding_small: 16-bit types only");
  }
}

}  // namespace embert
