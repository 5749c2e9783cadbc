// The embedding: as a separate kernel, and for batches of few rows in one launch with the layout that offsets.cu
// computes.

#include "common/barrier.cuh"
#include "common/launch.cuh"
#include "ops/embedding.h"
#include "ops/warp_row.cuh"

namespace embert {

// The tables are weights, which no kernel writes.
template <typename T, int kPacks>
__device__ __forceinline__ void load_table_row(Pack<T> (&packs)[kPacks], const T* row, int lane, int hidden) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (WarpRow<T, kPacks>::holds(p, lane, hidden)) packs[p] = load_pack(row + (p * 32 + lane) * Pack<T>::kSize);
  }
}

// Stores an embedded row before its LayerNorm, unchanged or times gamma. Its statistics go into the part of the first
// group (norm.h); those of the other groups are 0.
template <typename T, int kPacks>
__device__ __forceinline__ void store_unnormalized(WarpRow<T, kPacks>& values, const EmbeddingTables& tables, T* y,
                                                   float2* sums, int row, int lane, int hidden) {
  const float2 total = values.sums();
  if (tables.prescaled_rows) values.multiply(tables.norm.gamma, lane, hidden);
  values.store_into(y + size_t(row) * hidden, lane, hidden);
  const int groups = (hidden + kStatColumns - 1) / kStatColumns;
  for (int group = lane; group < groups; group += 32)
    sums[size_t(row) * groups + group] = group == 0 ? total : float2{0.0f, 0.0f};
}

namespace {

// y = LayerNorm(word[id] + position[p] + type[t]): gather and normalization in one pass, one warp per token. With
// `sums`: y is the sum itself, or gamma times it, and `sums` gets its row statistics (norm.h).
//
// Floor for 26 692 rows of 768, FP16: a word's row read (for common words mostly from L2) and one row written a token,
// 82 MB, 27 µs at 3 TB/s. The sum is in FP32; HuggingFace's FP16 rounds it twice.

constexpr int kWarps = 4;

// kWritesStats: the reader applies the LayerNorm, so no registers hold gamma and beta.
template <typename T, int kPacks, bool kWritesStats>
__global__ void __launch_bounds__(kWarps * 32)
    embedding_kernel(const EmbeddingTables tables, const int* ids, const int* types, const int* positions, int rows,
                     int hidden, float epsilon, T* y, float2* sums) {
  const int lane = threadIdx.x % 32;
  const int row = blockIdx.x * kWarps + threadIdx.x / 32;
  WarpRow<T, kPacks> values, gamma, beta;
  if constexpr (!kWritesStats) {
    gamma.load_vector(tables.norm.gamma, lane, hidden);
    beta.load_vector(tables.norm.beta, lane, hidden);
  }
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // not earlier: early_tile (ops/attention_work.h)
  if (row >= rows) return;
  values.clear();
  Pack<T> word_rows[kPacks], position_rows[kPacks];
  load_table_row(word_rows, static_cast<const T*>(tables.word) + size_t(ids[row]) * hidden, lane, hidden);
  load_table_row(position_rows, static_cast<const T*>(tables.position) + size_t(positions[row]) * hidden, lane, hidden);
  if (tables.type != nullptr) {
    Pack<T> type_rows[kPacks];
    load_table_row(type_rows, static_cast<const T*>(tables.type) + size_t(types[row]) * hidden, lane, hidden);
    values.add(type_rows, lane, hidden);
  }
  values.add(word_rows, lane, hidden);
  values.add(position_rows, lane, hidden);
  if constexpr (!kWritesStats) {
    values.normalize_into(y + size_t(row) * hidden, gamma, beta, lane, hidden, epsilon);
  } else {
    store_unnormalized(values, tables, y, sums, row, lane, hidden);
  }
}

// x = LayerNorm(x) + type[t] in place, one warp per row, in FP32 up to the store.

template <typename T, int kPacks>
__global__ void __launch_bounds__(kWarps * 32)
    add_types_kernel(const Norm norm, float epsilon, const T* type, const int* types, int rows, int hidden, T* x,
                     float2* sums) {
  const int lane = threadIdx.x % 32, row = blockIdx.x * kWarps + threadIdx.x / 32;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (row >= rows) return;
  T* const at = x + size_t(row) * hidden;
  Pack<T> own[kPacks], added[kPacks];
  load_row(own, at, lane, hidden);
  load_table_row(added, type + size_t(types[row]) * hidden, lane, hidden);
  WarpRow<T, kPacks> values;
  values.clear();
  values.add(own, lane, hidden);
  if (norm.gamma != nullptr) {
    values.standardize(lane, hidden, epsilon);
    values.multiply(norm.gamma, lane, hidden);
    values.with_vector(norm.beta, lane, hidden, [](float& element, float other) { element += other; });
  }
  values.add(added, lane, hidden);
  if (sums != nullptr) {
    store_unnormalized(values, EmbeddingTables{}, x, sums, row, lane, hidden);
  } else {
    values.store_into(at, lane, hidden);
  }
}

// y = scale · word[id], one warp per row: a gather for models whose embeddings have no positions, types or norm.

template <typename T>
__global__ void __launch_bounds__(kWarps * 32)
    embed_words_kernel(const T* word, const int* ids, int rows, int hidden, float scale, T* y, const float* after,
                       float2* y_stats) {
  constexpr int kWidth = Pack<T>::kSize;
  const int lane = threadIdx.x % 32, row = blockIdx.x * kWarps + threadIdx.x / 32;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // not earlier: early_tile (ops/attention_work.h)
  if (row >= rows) return;
  const T* const from = word + size_t(ids[row]) * hidden;
  const float factor = to_float(from_float<T>(scale));
  float2 sums = {0.0f, 0.0f};
#pragma unroll 4
  for (int column = lane * kWidth; column < hidden; column += 32 * kWidth) {
    Pack<T> pack = load_pack(from + column);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float value = factor * to_float(pack.values[i]);
      sums.x += value;
      sums.y = fmaf(value, value, sums.y);
      pack.values[i] = from_float<T>(after == nullptr ? value : value * __ldg(after + column + i));
    }
    store_pack(y + size_t(row) * hidden + column, pack);
  }
  if (y_stats == nullptr) return;
  sums = {warp_sum(sums.x), warp_sum(sums.y)};
  const int groups = (hidden + kStatColumns - 1) / kStatColumns;
  for (int group = lane; group < groups; group += 32)
    y_stats[size_t(row) * groups + group] = group == 0 ? sums : float2{0.0f, 0.0f};
}

// offsets.cu and embedding.cu in one launch, for batches of few rows, whose layer kernels take two microseconds.
//
// A cluster of up to eight blocks embeds one row per warp. The first block reads the whole batch from host memory, with
// one load a thread, and distributes it through the cluster's shared memory. If every block read it, the requests would
// queue at 0.6 µs each. Every warp computes its row's position itself, with a scan over the lengths, while the word's
// row is in flight. One more warp of the first block writes what attention and pooling need. Only results pass through
// device memory.

constexpr int kSmallWarps = 16;  // each embeds a row
constexpr int kSmallThreads = (kSmallWarps + 1) * 32;
static_assert(kSmallRows <= 8 * kSmallWarps, "a cluster");

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
__global__ void __launch_bounds__(kSmallThreads)
    embedding_small_kernel(const EmbeddingTables tables, const OffsetsInput in, int pieces, const OffsetsOutput out,
                           const OffsetsCapacity capacity, int hidden, T* y, float2* sums) {
  extern __shared__ uint4 batch[];  // [pieces]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = cluster_rank(), blocks = gridDim.x;
  if (rank > 0) griddepcontrol_launch_dependents();  // the first block not yet: early_tile (ops/attention_work.h)
  griddepcontrol_wait();                             // the previous batch may still read what is overwritten here
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

  const auto in_shared = [&](const void* part) {
    const size_t offset = static_cast<const uint8_t*>(part) - reinterpret_cast<const uint8_t*>(in.header);
    return reinterpret_cast<const int*>(reinterpret_cast<const uint8_t*>(batch) + offset);
  };
  const int* const lengths = in_shared(in.lengths);
  const int sequences = in_shared(in.header)[0], tokens = in_shared(in.header)[1];
  if (warp == kSmallWarps) {
    if (rank > 0) return;
    write_lists(lengths, in_shared(in.cuts), sequences, tokens, out, capacity, lane);
    __threadfence();
    __syncwarp();
    griddepcontrol_launch_dependents();
    return;
  }

  const int row = rank * kSmallWarps + warp;
  if (row >= capacity.tokens) return;
  const bool exists = row < tokens;  // the others are as in offsets.cu: token 0 at position 0
  Pack<T> word_rows[kPacks], position_rows[kPacks], type_rows[kPacks];
  const auto load = [&](Pack<T>(&packs)[kPacks], const void* table, int index) {
    load_table_row(packs, static_cast<const T*>(table) + size_t(index) * hidden, lane, hidden);
  };
  load(word_rows, tables.word, exists ? in_shared(in.ids)[row] : 0);
  if (tables.type != nullptr) load(type_rows, tables.type, exists ? in_shared(in.types)[row] : 0);
  int position = 0;
  for_sequences(lengths, exists ? sequences : 0, lane, [&](int, int length, int start) {
    const unsigned begun = __ballot_sync(~0u, length > 0 && start <= row);
    if (begun != 0) position = row - __shfl_sync(~0u, start, 31 - __clz(begun));
  });
  load(position_rows, tables.position, position);
  WarpRow<T, kPacks> values;
  values.clear();
  if (tables.type != nullptr) values.add(type_rows, lane, hidden);
  values.add(word_rows, lane, hidden);
  values.add(position_rows, lane, hidden);
  store_unnormalized(values, tables, y, sums, row, lane, hidden);
}

}  // namespace

Status embed(DType dtype, const EmbeddingTables& tables, const int* ids, const int* types, const int* positions,
             int rows, int hidden, float epsilon, void* y, float2* sums, const Stream& stream) {
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return with_row_packs<T>("embedding", hidden, [&](auto packs) {
      const auto kernel = sums != nullptr ? embedding_kernel<T, packs, true> : embedding_kernel<T, packs, false>;
      return launch("embedding", kernel, (rows + kWarps - 1) / kWarps, kWarps * 32, 0, stream, tables, ids, types,
                    positions, rows, hidden, epsilon, static_cast<T*>(y), sums);
    });
  });
}

Status embed_words(DType dtype, const void* word, const int* ids, int rows, int hidden, float scale, void* y,
                   const float* after, float2* y_stats, const Stream& stream) {
  if (hidden % (16 / bytes_of(dtype)) != 0)
    return Status::refused("embedding: ", hidden, " columns do not fill 16-byte packs");
  return with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return launch("embedding", embed_words_kernel<T>, (rows + kWarps - 1) / kWarps, kWarps * 32, 0, stream,
                  static_cast<const T*>(word), ids, rows, hidden, scale, static_cast<T*>(y), after, y_stats);
  });
}

Status add_types(DType dtype, const Norm& norm, float epsilon, const void* type, const int* types, int rows, int hidden,
                 void* x, float2* sums, const Stream& stream) {
  return with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    return with_row_packs<T>("add_types", hidden, [&](auto packs) {
      return launch("add_types", add_types_kernel<T, packs>, (rows + kWarps - 1) / kWarps, kWarps * 32, 0, stream, norm,
                    epsilon, static_cast<const T*>(type), types, rows, hidden, static_cast<T*>(x), sums);
    });
  });
}

Status embed_small(DType dtype, const EmbeddingTables& tables, const OffsetsInput& in, size_t bytes,
                   const OffsetsOutput& out, const OffsetsCapacity& capacity, int hidden, void* y, float2* sums,
                   const Stream& stream) {
  if (capacity.tokens > kSmallRows || bytes % sizeof(uint4) != 0 || bytes / sizeof(uint4) > kSmallThreads) {
    return Status::refused("embedding_small: a batch of ", capacity.tokens, " rows in ", bytes, " bytes");
  }
  if (dtype == DType::kFloat32) return Status::refused("embedding_small: 16-bit types only");
  return with_half_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    return with_row_packs<T>("embedding_small", hidden, [&](auto packs) {
      if constexpr (packs * 32 * Pack<T>::kSize > kMaxStatColumns) {
        return Status::refused("embedding_small: hidden size ", hidden, " is too large");
      } else {
        const int blocks = (capacity.tokens + kSmallWarps - 1) / kSmallWarps;
        return launch_clusters("embedding_small", embedding_small_kernel<T, packs>, blocks, blocks, kSmallThreads,
                               bytes, stream, tables, in, int(bytes / sizeof(uint4)), out, capacity, hidden,
                               static_cast<T*>(y), sums);
      }
    });
  });
}

}  // namespace embert
