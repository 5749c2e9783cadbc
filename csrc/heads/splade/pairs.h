// From maxima over texts to (index, value) pairs, one for each column that is not 0. Each launcher checks its
// arguments, launches on a stream and returns immediately.
#pragma once

#include <cstdint>

#include "common/launch.h"

namespace embert {

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

// begin: text_of (gemm/text_maxima.h) of the span's rows, and zeros for the accumulators.
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
// all texts after it: `counts` tells the host which.
//   before: pairs of all earlier texts; null: none. after: destination of the next span's `before`.
Status write_pairs(const float* maxima, int columns, int pitch, int first, int count, const int* totals,
                   const int* pieces, const int64_t* before, int64_t* after, const PairBuffers& to,
                   const Stream& stream);

}  // namespace embert
