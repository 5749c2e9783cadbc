// From ids to the first rows, and from the last rows to their means, on a CPU with AVX-512.
#pragma once

#include <cstdint>

namespace embert::cpu {

// A table's rows [rows, columns].
struct Table {
  const float* first;
  std::int64_t rows;
};

// words[ids[i]] + positions[places[i]], normalized as norm.h does → y [tokens, columns]. Returns whether all ids and
// places are rows of their tables; if not, y is incomplete.
bool embed(const std::int64_t* ids, const std::int64_t* places, int tokens, const Table& words, const Table& positions,
           int columns, const float* gamma, const float* beta, float epsilon, float* y, int threads);

// The mean of each sequence's rows: x [sequences, length, columns] → y [sequences, columns].
void mean(const float* x, int sequences, int length, int columns, float* y, int threads);

}  // namespace embert::cpu
