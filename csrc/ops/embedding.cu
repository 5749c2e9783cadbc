// y = LayerNorm(word[id] + position[p] + type[t]): gather and normalization in one pass, one warp per token. With
// `sums`: y is the sum itself, or gamma times it, and `sums` gets its row statistics (norm.h).
//
// Floor for 26 692 rows of 768, FP16: a word's row read (for common words mostly from L2) and one row written a token,
// 82 MB, 27 µs at 3 TB/s. The sum is in FP32; HuggingFace's FP16 rounds it twice.

#include "common/dependent_launch.cuh"
#include "ops/embedding.h"
#include "ops/embedding_row.cuh"

namespace embert {
namespace {

constexpr int kWarps = 4;

// kLeavesSums: the reader applies the LayerNorm, so no registers hold gamma and beta.
template <typename T, int kPacks, bool kLeavesSums>
__global__ void __launch_bounds__(kWarps * 32)
    embedding_kernel(const EmbeddingTables tables, const int* ids, const int* types, const int* positions, int rows,
                     int hidden, float epsilon, T* y, float2* sums) {
  const int lane = threadIdx.x % 32;
  const int row = blockIdx.x * kWarps + threadIdx.x / 32;
  WarpRow<T, kPacks> values, gamma, beta;
  if constexpr (!kLeavesSums) {
    gamma.load_vector(tables.norm.gamma, lane, hidden);
    beta.load_vector(tables.norm.beta, lane, hidden);
  }
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // not earlier: early_tile (ops/attention_work_list.cuh)
  if (row >= rows) return;
  values.clear();
  Pack<T> words[kPacks], places[kPacks];
  load_table_row(words, static_cast<const T*>(tables.word) + size_t(ids[row]) * hidden, lane, hidden);
  load_table_row(places, static_cast<const T*>(tables.position) + size_t(positions[row]) * hidden, lane, hidden);
  if (tables.type != nullptr) {
    Pack<T> kinds[kPacks];
    load_table_row(kinds, static_cast<const T*>(tables.type) + size_t(types[row]) * hidden, lane, hidden);
    values.add(kinds, lane, hidden);
  }
  values.add(words, lane, hidden);
  values.add(places, lane, hidden);
  if constexpr (!kLeavesSums) {
    values.normalize_into(y + size_t(row) * hidden, gamma, beta, lane, hidden, epsilon);
  } else {
    store_unnormalized(values, tables, y, sums, row, lane, hidden);
  }
}

template <typename T>
Status launch_embed(const EmbeddingTables& tables, const int* ids, const int* types, const int* positions, int rows,
                    int hidden, float epsilon, void* y, float2* sums, const Stream& stream) {
  return with_row_packs<T>("embedding", hidden, [&](auto packs) {
    const auto kernel = sums != nullptr ? embedding_kernel<T, packs, true> : embedding_kernel<T, packs, false>;
    return launch("embedding", kernel, (rows + kWarps - 1) / kWarps, kWarps * 32, 0, stream, tables, ids, types,
                  positions, rows, hidden, epsilon, static_cast<T*>(y), sums);
  });
}

}  // namespace

Status embed(DType dtype, const EmbeddingTables& tables, const int* ids, const int* types, const int* positions,
             int rows, int hidden, float epsilon, void* y, float2* sums, const Stream& stream) {
  switch (dtype) {
    case DType::kFloat16:
      return launch_embed<half_t>(tables, ids, types, positions, rows, hidden, epsilon, y, sums, stream);
    case DType::kBFloat16:
      return launch_embed<bfloat_t>(tables, ids, types, positions, rows, hidden, epsilon, y, sums, stream);
    default:
      return launch_embed<float>(tables, ids, types, positions, rows, hidden, epsilon, y, sums, stream);
  }
}

}  // namespace embert
