// y = LayerNorm(word[id] + position[p] + type[t]): gather and normalisation in one pass, a warp a token. With `sums`: y
// is the sum itself, or gamma times it, and `sums` has what its LayerNorm needs (norm.h).
//
// Floor for 26 692 rows of 768, FP16: a word's row read (for common words mostly from L2) and one row written a token,
// 82 MB, 27 µs at 3 TB/s. The sum is in FP32; HuggingFace's FP16 rounds it twice.
//
// A token waits for memory twice, for its id and for the word's row, and registers leave room for few warps. So where
// tokens are many, a warp has several. It asks for all their ids at once, and for a word's row long before its use. The
// row waits in shared memory, where each lane reads only what it has copied itself, so no barrier is needed.

#include <algorithm>

#include "device/dependent_launch.cuh"
#include "embedding/embedding.h"
#include "embedding/embedding_row.cuh"
#include "ptx/shared_memory.cuh"

namespace embert {
namespace {

constexpr int kWarps = 4;  // of a block
// A launch has at most so many times the blocks that fit the device at once; they share the rows.
constexpr int kRounds = 1;
// Rows of a warp that are on their way or in use. By count: at 3 TB/s and 0.8 µs of latency 18 KB a multiprocessor
// must be in flight, and under load twice that. 16 warps with three rows of 768 each have 72 KB.
constexpr int kRowsAhead = 4;

// kLeavesSums: the LayerNorm is left to the reader, so no registers hold gamma and beta.
template <typename T, int kPacks, bool kLeavesSums>
__global__ void __launch_bounds__(kWarps * 32)
    embedding_kernel(const EmbeddingTables tables, const int* ids, const int* types, const int* positions, int rows,
                     int hidden, float epsilon, T* y, float2* sums) {
  constexpr int kFit = 24 / kPacks, kAhead = kFit < kRowsAhead ? kFit : kRowsAhead;  // in 48 KB of shared memory
  __shared__ Pack<T> words_of[kWarps][kAhead][kPacks][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int stride = gridDim.x * kWarps;  // between a warp's rows
  WarpRow<T, kPacks> gamma, beta;
  if constexpr (!kLeavesSums) {
    gamma.load_vector(tables.norm.gamma, lane, hidden);
    beta.load_vector(tables.norm.beta, lane, hidden);
  }
  wait_for_earlier_kernels();
  dependents_may_launch();  // not earlier: early_tile (attention/work_list.cuh)
  for (int first = blockIdx.x * kWarps + warp; first < rows; first += 32 * stride) {
    // Each lane reads what belongs to one of 32 rows.
    const int count = min(32, (rows - first + stride - 1) / stride), of_lane = first + min(lane, count - 1) * stride;
    const int id = ids[of_lane], place = positions[of_lane], kind = tables.type == nullptr ? 0 : types[of_lane];
    const auto ask = [&](int i, int slot) {
      const T* const word = static_cast<const T*>(tables.word) + size_t(__shfl_sync(~0u, id, i % 32)) * hidden;
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        if (i < count && WarpRow<T, kPacks>::holds(p, lane, hidden))
          copy_async(shared_address(&words_of[warp][slot][p][lane]), word + (p * 32 + lane) * Pack<T>::kSize, true);
      }
      commit_copies();
    };
#pragma unroll
    for (int i = 0; i + 1 < kAhead; ++i) ask(i, i);
#pragma unroll 1
    for (int i = 0, slot = 0; i < count; ++i) {
      const int freed = slot == 0 ? kAhead - 1 : slot - 1;
      __syncwarp();  // keeps the copy behind the reads of the row before
      ask(i + kAhead - 1, freed);
      Pack<T> places[kPacks], kinds[kPacks];
      load_table_row(places, static_cast<const T*>(tables.position) + size_t(__shfl_sync(~0u, place, i)) * hidden, lane,
                     hidden);
      if (tables.type != nullptr)
        load_table_row(kinds, static_cast<const T*>(tables.type) + size_t(__shfl_sync(~0u, kind, i)) * hidden, lane,
                       hidden);
      wait_copies<kAhead - 1>();
      WarpRow<T, kPacks> values;
      values.clear();
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        stay_packed(places[p]);
        if (tables.type != nullptr) {
          stay_packed(kinds[p]);
          values.add(p, kinds[p], lane, hidden);
        }
        values.add(p, words_of[warp][slot][p][lane], lane, hidden);
        values.add(p, places[p], lane, hidden);
      }
      slot = slot + 1 == kAhead ? 0 : slot + 1;
      const int row = first + i * stride;
      if constexpr (!kLeavesSums) {
        values.normalise_into(y + size_t(row) * hidden, gamma, beta, lane, hidden, epsilon);
      } else {
        leave_row(values, tables, y, sums, row, lane, hidden);
      }
    }
  }
}

template <typename T>
Status launch_embed(const EmbeddingTables& tables, const int* ids, const int* types, const int* positions, int rows,
                    int hidden, float epsilon, void* y, float2* sums, const Stream& stream) {
  return with_row_packs<T>("embedding", hidden, [&](auto packs) -> Status {
    const auto kernel = sums != nullptr ? embedding_kernel<T, packs, true> : embedding_kernel<T, packs, false>;
    int device = 0, processors = 0, resident = 0;
    EMBERT_CUDA(cudaGetDevice(&device));
    EMBERT_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    EMBERT_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kWarps * 32, 0));
    const int blocks = std::min((rows + kWarps - 1) / kWarps, kRounds * resident * processors);
    return launch("embedding", kernel, blocks, kWarps * 32, 0, stream, tables, ids, types, positions, rows, hidden,
                  epsilon, static_cast<T*>(y), sums);
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
