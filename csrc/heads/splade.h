// SPLADE: a sparse vector per text, from the last layer's rows. Transform (linear, activation, LayerNorm), then for
// each token of the vocabulary the largest log1p(relu(logit)) over the text's rows, as (index, value) pairs.
//
// The logits are never in memory as a whole (gemm/gemm.h). Their maxima are: `kMaximaBytes` at most, so texts
// come in groups. Only the device knows the number of pairs. They go to host memory, which is reserved for `kPairs`:
// real models have some hundreds a text. The host runs texts again whose pairs do not fit.
#pragma once

#include <cstdint>
#include <memory>

#include "common/launch.h"
#include "common/memory.h"
#include "gemm/gemm.h"
#include "heads/tasks.h"

namespace embert {

// From maxima over texts to (index, value) pairs, one for each column that is not 0. Each launcher checks its
// arguments, launches on a stream and returns immediately.

// The columns that a block counts or writes, and its results.
constexpr int kPieceColumns = 1024;
inline int pieces_of(int columns) {
  return (columns + kPieceColumns - 1) / kPieceColumns;
}

// Consecutive texts among those that request pairs. Rows of x have the order of the texts; rows of texts that do not
// request pairs may lie between them.
struct TextSpan {
  const int* cu_seqlens;  // [B + 1], device memory
  const int* chosen;  // [all texts that request pairs], device memory: which of the B they are, ascending; null: all
  int first, count;   // of those
  int end_row;        // the first row after theirs
};

// begin: text_of (gemm/gemm.h) of the span's rows, and zeros for the accumulators.
//   maxima: [count, pitch]; totals: [count]
Status begin_maxima(const TextSpan& span, int pitch, int* text_of, float* maxima, int* totals, const Stream& stream);

// count: how many columns of each text are not 0, in total and in each piece.
//   totals: [count], 0 before; pieces: [count, pieces_of(columns)]
Status count_pairs(const float* maxima, int columns, int pitch, int count, int* totals, int* pieces,
                   const Stream& stream);

// Destination of pairs: the texts' pairs end to end, indices ascending in each. Host memory that the device writes
// directly, or device memory.
struct PairBuffers {
  int* counts;    // [all texts that request pairs]: pairs of each
  int* indices;   // [capacity]
  float* values;  // [capacity]: log1p of the maxima, `logs` times
  int64_t capacity;
  int logs;  // 1 or 2
};

// write: the pairs of a span, after those of earlier spans. A text that does not fit as a whole is skipped, and so are
// all texts after it: the host reads `counts`.
//   before: pairs of all earlier texts; null: none. after: destination of the next span's `before`.
Status write_pairs(const float* maxima, int columns, int pitch, int first, int count, const int* totals,
                   const int* pieces, const int64_t* before, int64_t* after, const PairBuffers& to,
                   const Stream& stream);

constexpr size_t kMaximaBytes = size_t(64) << 20;  // of maxima at a time
constexpr int64_t kPairs = int64_t(8) << 20;       // of a batch, 8 bytes each

// The pairs of one batch, in host memory that the device writes; one for each batch in flight. Readable after the
// batch's event.
class SpladePairs {
 public:
  // Allocates memory for at least one text's pairs, and for this number of texts.
  Status allocate(int vocabulary, int texts);
  // The number of texts, of the first `texts`, whose pairs are all here.
  int complete(int texts) const;
  const int* counts() const { return counts_.as<int>(); }    // [texts]
  const int* indices() const { return indices_.as<int>(); }  // end to end
  const float* values() const { return values_.as<float>(); }
  int64_t capacity() const { return capacity_; }
  PairBuffers places(int logs) const {
    return {counts_.as<int>(), indices_.as<int>(), values_.as<float>(), capacity_, logs};
  }

 private:
  HostBuffer counts_, indices_, values_;
  int64_t capacity_ = 0;
};

// A batch as the head sees it.
struct SpladeBatch {
  const void* x;          // [rows, hidden], after the last LayerNorm
  void* scratch;          // [rows, hidden], not x: for transformed rows
  int rows, texts;        // texts: those that request pairs
  const int* cu_seqlens;  // [B + 1], device memory
  const int* chosen;      // [texts], device memory: which of the B request pairs, ascending; null: the first ones
  // The same in host memory.
  const int* host_cu_seqlens;
  const int* host_chosen;
};

// Weights on the device.
struct SpladeWeights {
  void *transform = nullptr, *decoder = nullptr;                             // [hidden, hidden], [vocabulary, hidden]
  const float *transform_bias = nullptr, *gamma = nullptr, *beta = nullptr;  // [hidden]
  const float* decoder_bias = nullptr;                                       // [vocabulary]
};

class SpladeHead {
 public:
  explicit SpladeHead(const SpladeShape& shape) : shape_(shape) {}

  // To be called after the weights are loaded. Allocates scratch for batches of this number of rows and texts.
  Status prepare(GemmProvider& gemm, const SpladeWeights& weights, int rows, int texts, const Stream& stream);

  // Queues a batch. Its result is ready when the stream has completed.
  Status run(const SpladeBatch& batch, const SpladePairs& result, const Stream& stream);

  // Device memory in addition to the weights.
  size_t workspace_bytes() const { return work_.bytes() + (maxima_ == nullptr ? 0 : maxima_->workspace_bytes()); }

 private:
  void lay_out_scratch(uint8_t* base, int rows, size_t& bytes);
  // The next group of texts from `first` on: as many as fit the maxima.
  TextSpan group_from(int first, const SpladeBatch& batch, int& first_row) const;

  SpladeShape shape_;
  SpladeWeights weights_;
  DeviceBuffer work_;
  std::unique_ptr<Linear> transform_;
  std::unique_ptr<TextMaxima> maxima_;
  struct {
    float* maxima;         // [texts_at_once, maxima_pitch(vocabulary)]
    int* text_of;          // [rows]
    int *totals, *pieces;  // [texts_at_once], [texts_at_once, pieces_of(vocabulary)]
    int64_t* ends;         // [2]: pairs up to the end of a group, alternating
  } scratch_{};
  int texts_at_once_ = 0;
};

}  // namespace embert
