// Operations on rows, on a CPU with AVX-512: the embedding, LayerNorm and RMSNorm, means of sequences.
#pragma once

#include <cstdint>

namespace embert::cpu {

// x [rows, columns] → y, which may be x. With beta (x - mean) / √(variance + epsilon) · gamma + beta; without, `beta`
// null, x / √(mean square + epsilon) · gamma. `gamma` and `beta` are [columns].
void normalize(const float* x, int rows, int columns, const float* gamma, const float* beta, float epsilon, float* y,
               int threads);

// A table's rows [rows, columns].
struct Table {
  const float* first;
  std::int64_t rows;
};

// words[ids[i]] + positions[places[i]], normalized as above → y [tokens, columns]. Returns whether all ids and
// places are rows of their tables; if not, y is incomplete.
bool embed(const std::int64_t* ids, const std::int64_t* position_ids, int tokens, const Table& words,
           const Table& positions, int columns, const float* gamma, const float* beta, float epsilon, float* y,
           int threads);

// The mean of each sequence's rows: x [sequences, length, columns] → y [sequences, columns].
void mean(const float* x, int sequences, int length, int columns, float* y, int threads);

}  // namespace embert::cpu
