// The embedding, from ids to the first rows.

#include "common/launch.cuh"
#include "ops/embedding.h"
#include "ops/warp_row.cuh"

namespace embert {
namespace {

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

}  // namespace embert
